"""Delayed jobs by hand: list, find by id, promote before their time, take out.

A job added with an id of the caller's has an index entry that leads to its member. Ids that were made, and jobs that
wait for a retry, have none: those are found by a walk through the set, in pages of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chasqui.errors import DecodeError, QueueFull
from chasqui.job import DelayedJob
from chasqui.payload import PayloadCodec
from chasqui.protocol.codec import decode_envelope, decode_name, split_member
from chasqui.protocol.flow import Arg, Batch, Command, Flow, call_script, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.produce import Room
from chasqui.protocol.replies import job, number, score_ms
from chasqui.protocol.scripts import SCRIPT_BYTES, SCRIPT_ENTRIES, script

# A member may have a megabyte: a page has to be small enough for that.
PAGE = 100


def listed(keys: Keys, codec: PayloadCodec, limit: int) -> Flow[list[DelayedJob]]:
    """The jobs that are due next."""
    found: list[DelayedJob] = []
    while len(found) < limit:
        last = min(limit, len(found) + PAGE) - 1
        flat = yield command("ZRANGE", keys.delayed, len(found), last, "WITHSCORES", safe=True)
        if not flat:
            break
        found += [_delayed(flat[i], flat[i + 1], codec) for i in range(0, len(flat) - 1, 2)]
    return found


def promote(keys: Keys, room: Room, ids: Sequence[str]) -> Flow[list[bool]]:
    """Move the jobs of those ids to the stream; True for those that were still delayed.

    Not sent again after a lost reply: the second answer would be False for a job that the first call moved.
    """
    found = yield from _find(keys, ids)
    moved: set[str] = set()
    for chunk in _chunks(found):
        args: list[Arg] = [room.cap, room.trim, *(member for _, member in chunk)]
        answers = yield from call_script(script("promote_members"), [keys.delayed, keys.stream], args)
        moved |= {job_id for (job_id, _), answer in zip(chunk, answers, strict=True) if number(answer) == 1}
        if any(number(answer) == -1 for answer in answers):
            raise QueueFull(
                f"queue {keys.queue!r} is full ({room.cap} jobs): {len(moved)} jobs were promoted, the others stay "
                f"delayed; let workers drain it, or raise max_stream_len"
            )
    if moved:
        # Killed before this, the index entries lead to members that are gone, until they expire: nobody minds.
        yield Command(("UNLINK", *map(keys.delayed_index, sorted(moved))), safe=True)
    return [job_id in moved for job_id in ids]


def take_out(keys: Keys, ids: Sequence[str]) -> Flow[list[bool]]:
    """Remove the jobs of those ids, wherever in the set they are; True for those that were still there.

    Not sent again after a lost reply, as above. Killed between the two steps: the job is gone, and its id stays taken
    until the marker expires.
    """
    found = yield from _find(keys, ids)
    removed: set[str] = set()
    for chunk in _chunks(found):
        replies = yield Batch(tuple(command("ZREM", keys.delayed, member) for _, member in chunk))
        removed |= {job_id for (job_id, _), reply in zip(chunk, values(replies), strict=True) if number(reply)}
    if removed:
        markers = [key for i in sorted(removed) for key in (keys.delayed_index(i), keys.dedup(i))]
        yield Command(("UNLINK", *markers), safe=True)
    return [job_id in removed for job_id in ids]


def _find(keys: Keys, ids: Sequence[str]) -> Flow[dict[str, bytes]]:
    """The members of those ids: by their index entries, and by a walk for those that have none."""
    found: dict[str, bytes] = {}
    if not ids:
        return found
    indexed = values((yield Batch(tuple(command("GET", keys.delayed_index(i), safe=True) for i in ids))))
    hints = {i: member for i, member in zip(ids, indexed, strict=True) if member is not None}
    scores = yield Batch(tuple(command("ZSCORE", keys.delayed, member, safe=True) for member in hints.values()))
    found |= {i: m for (i, m), score in zip(hints.items(), values(scores), strict=True) if score is not None}
    wanted = set(ids) - set(found)
    cursor: Any = b"0"
    while wanted:
        # A scan, not ranks: those shift while the promoter takes jobs off the low end.
        cursor, flat = yield command("ZSCAN", keys.delayed, cursor, "COUNT", PAGE, safe=True)
        for member in flat[::2]:
            try:
                job_id = decode_envelope(split_member(member)[1]).id
            except DecodeError:
                continue
            if job_id in wanted:
                found[job_id] = member
                wanted.discard(job_id)
        if cursor == b"0":
            break
    return found


def _chunks(found: dict[str, bytes]) -> Iterator[list[tuple[str, bytes]]]:
    """In calls of the size that a script may have."""
    chunk: list[tuple[str, bytes]] = []
    size = 0
    for job_id, member in found.items():
        if chunk and (len(chunk) == SCRIPT_ENTRIES or size + len(member) > SCRIPT_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append((job_id, member))
        size += len(member)
    if chunk:
        yield chunk


def _delayed(member: bytes, score: bytes, codec: PayloadCodec) -> DelayedJob:
    """Total: a member that is no job is shown as what it is."""
    run_at_ms = score_ms(score)
    try:
        name, envelope = split_member(member)
        return DelayedJob(run_at_ms, decode_name(name), job(envelope, name, "", codec), member)
    except DecodeError:
        return DelayedJob(run_at_ms, "", None, member)
