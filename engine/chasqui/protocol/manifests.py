"""Batches of jobs in a Spark driver's hands: taken, written down, run, settled.

Spark remembers a batch by its number only, so what belongs to it is written down on the server, in a *manifest*: a hash
``{chasqui:<queue>}:spark:<sid>:batch:<seq>`` of blocks of entry ids, filled by the same script that takes the jobs. The
``sid`` is minted for each checkpoint and is part of everything here, also of the consumer's name ``spark-<sid>``: a
checkpoint can only touch what it took itself. Its *session* ``{chasqui:<queue>}:spark:<sid>:session`` holds the lease:
who drives it, and a token that grows whenever that changes. Scripts that take, renew, plan or release refuse an older
token. Settling asks for none, because Spark's commit log has decided, and whoever knows of the commit may act on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chasqui.protocol.consume import Entry, Member
from chasqui.protocol.flow import Arg, Batch, Command, Flow, call_script, call_scripts, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.reading import TOO_LONG
from chasqui.protocol.replies import number, plain
from chasqui.protocol.scripts import SCRIPT_BYTES, SCRIPT_ENTRIES, script

CONSUMER_PREFIX = "spark-"
KEEP_MS = 7 * 24 * 3_600_000
"""How long sessions and manifests outlive their driver. After that their jobs are long stale, and taken over."""
ENDED_KEEP_S = 600
PAGE = 100
_BLOCKS_AT_ONCE = 8
_ITEM = re.compile(rb"(?<!\S)(\d{1,20}-\d{1,20})(?::(\d{1,18}))?(?!\S)")

Item = tuple[bytes, int]
"""A job of a manifest: entry id, and how often it was delivered before it was taken."""


@dataclass(frozen=True, slots=True)
class Lease:
    """``token`` is None where another process holds it: for ``left_ms`` more, unless renewed (``until`` tells)."""

    token: int | None
    left_ms: int = 0
    until: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a claim came to: jobs taken by this call, and the manifest's jobs and bytes in all."""

    now: int
    jobs: int
    size: int
    narrowed: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A manifest as it stands before it is run. ``state``: empty, or why nothing is to be read from it any more.
    ``wait_ms``: tasks of the driver before are at work on it, for so long at least, and nothing else is known.
    """

    runs: int = 0
    jobs: int = 0
    blocks: int = 0
    state: str = ""
    new: bool = False
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch has come: whether it is there, the Spark run whose tasks have begun to read it (empty: none), how
    many of that driver's tasks have not ended, and for how long none of them has been heard of.
    """

    there: bool
    run: str
    tasks: int
    silent_ms: int


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint's place in a queue's group."""

    keys: Keys
    group: str
    sid: str

    @property
    def member(self) -> Member:
        return Member(self.keys, self.group, CONSUMER_PREFIX + self.sid)

    @property
    def session(self) -> str:
        return self.keys.spark_session(self.sid)

    def manifest(self, seq: int) -> str:
        return self.keys.spark_manifest(self.sid, seq)

    # The lease.

    def take(self, holder: str, ttl_ms: int, label: str, terms: str) -> Flow[Lease]:
        args: list[Arg] = [holder, ttl_ms, KEEP_MS, label, terms]
        reply = yield from call_script(script("take_session"), [self.session], args, safe=True)
        if number(reply[0]):
            return Lease(number(reply[1]))
        return Lease(None, number(reply[2]), plain(reply[3]))

    def keep(self, token: int, ttl_ms: int, seqs: Sequence[int] = (), linger_ms: int = 0) -> Flow[bool]:
        """Renew the lease; with 0 give it back, with jobs that may be at work for so long. False: another has it."""
        keys, args = (
            [self.session, *(self.manifest(seq) for seq in seqs)],
            list[Arg]((token, ttl_ms, KEEP_MS, linger_ms)),
        )
        return number((yield from call_script(script("keep_session"), keys, args, safe=True))) == 1

    def terms(self) -> Flow[str | None]:
        """How the session's jobs are settled, as its driver wrote it down; None when it is gone."""
        reply = yield command("HGET", self.session, "terms", safe=True)
        return None if reply is None else plain(reply)

    # Taking.

    def claim(
        self,
        seq: int,
        token: int,
        limit: int,
        *,
        min_idle_ms: int = 0,
        upto: str = "",
        slices: int = 1,
        room: int = SCRIPT_BYTES,
    ) -> Flow[Taken | None]:
        """The next slices: new jobs, or with ``min_idle_ms`` those of silent workers. None: the token is old."""
        args: list[Arg] = [token, self.group, self.member.consumer, limit, SCRIPT_ENTRIES, min_idle_ms, upto, KEEP_MS]
        args.append(min(room, SCRIPT_BYTES))
        call = script("claim_batch"), [self.session, self.manifest(seq), self.keys.stream, self.keys.paused], args
        replies = values((yield from call_scripts([call] * slices, safe=True)))
        if number(replies[-1][0]) < 0:
            return None
        now = sum(max(0, number(reply[0])) for reply in replies)
        return Taken(now, number(replies[-1][1]), number(replies[-1][2]), number(replies[-1][3]) == 1)

    def seal(self, seq: int, token: int) -> Flow[int | None]:
        """Close the manifest; how many jobs it holds. None: the token is old."""
        keys = [self.session, self.manifest(seq)]
        found = number((yield from call_script(script("seal_batch"), keys, [token], safe=True)))
        return None if found < 0 else found

    def exists(self, seq: int) -> Flow[bool]:
        return number((yield command("EXISTS", self.manifest(seq), safe=True))) == 1

    # Running.

    def plan(self, seq: int, token: int, holder: str, silent_ms: int) -> Flow[Plan | bool | None]:
        """Count a run. None: there is no such manifest. False: the token is old."""
        keys = [self.session, self.manifest(seq)]
        reply = yield from call_script(script("plan_batch"), keys, [token, holder, silent_ms], safe=True)
        if number(reply[0]) < 0:
            return False
        if not number(reply[0]):
            return None
        if number(reply[0]) == 2:
            return Plan(wait_ms=number(reply[1]))
        runs, jobs, blocks = (number(part) for part in reply[1:4])
        return Plan(runs, jobs, blocks, plain(reply[4]), number(reply[5]) == 1)

    def revalidate(self, seq: int, token: int, blocks: int, min_idle_ms: int) -> Flow[int | None]:
        """Go through all blocks; how many jobs were struck out. None: the token is old."""
        dropped = 0
        for block in range(1, blocks + 1):
            reply = yield from call_script(
                script("revalidate_batch"),
                [self.session, self.manifest(seq), self.keys.stream],
                [token, self.group, self.member.consumer, block, min_idle_ms],
                safe=True,
            )
            if number(reply[0]) < 0:
                return None
            dropped += number(reply[1])
        return dropped

    def items(self, seq: int, blocks: Sequence[int]) -> Flow[list[list[Item]]]:
        """The jobs of these blocks; a block that is gone is empty."""
        return [_items(text) for text in (yield from self._texts(seq, blocks))]

    def _texts(self, seq: int, blocks: Sequence[int]) -> Flow[list[bytes | None]]:
        return list((yield command("HMGET", self.manifest(seq), *(f"b{block}" for block in blocks), safe=True)))

    def sizes(self, seq: int, blocks: int) -> Flow[list[int]]:
        """How many jobs each block holds, from the first."""
        found: list[int] = []
        for start in range(1, blocks + 1, PAGE):
            chosen = range(start, min(start + PAGE, blocks + 1))
            texts = yield from self._texts(seq, chosen)
            found += [text.count(b" ") + 1 if text else 0 for text in texts]
        return found

    def begin_task(self, seq: int, token: int, run: str, task: str) -> Flow[bool | None]:
        """Note that a task of that run begins to read, or is still at work. False: there is nothing to read. None: the
        token is old.
        """
        keys = [self.session, self.manifest(seq)]
        found = number((yield from call_script(script("begin_task"), keys, [token, run, task], safe=True)))
        return None if found < 0 else found == 1

    def end_task(self, seq: int, token: int, task: str) -> Flow[None]:
        """Note that nothing of that task is running any more."""
        yield from call_script(script("end_task"), [self.manifest(seq)], [token, task], safe=True)

    def progress(self, seq: int, token: int) -> Flow[Progress]:
        key = self.manifest(seq)
        asked = command("HMGET", key, "count", "run", f"tasks:{token}", f"beat:{token}", safe=True)
        held, now = values((yield Batch((asked, command("TIME", safe=True, route=key)))))
        count, run, tasks, beat = held
        now_ms = number(now[0]) * 1000 + number(now[1]) // 1000
        return Progress(count is not None, plain(run), number(tasks), now_ms - number(beat))

    # Ending.

    def blocks(self, seq: int) -> Flow[int]:
        """How many blocks the manifest was filled with; 0 where it is gone."""
        return number((yield command("HGET", self.manifest(seq), "blocks", safe=True)))

    def unsettled(self, seq: int, blocks: Sequence[int]) -> Flow[list[list[bytes]]]:
        """The jobs of these blocks that are still ours, block by block, several blocks in a round trip."""
        found: list[list[bytes]] = []
        stream, group, consumer = self.keys.stream, self.group, self.member.consumer
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            items = yield from self.items(seq, blocks[start : start + _BLOCKS_AT_ONCE])
            chosen = [[entry_id for entry_id, _ in some] for some in items]
            # The ids of a block ascend. Nearly always nothing of ours is pending from its first to its last.
            ends = [(ids[0], ids[-1]) if ids else ("0-1", "0-1") for ids in chosen]
            asked = [command("XPENDING", stream, group, *pair, SCRIPT_ENTRIES, consumer, safe=True) for pair in ends]
            for ids, reply in zip(chosen, values((yield Batch(tuple(asked)))), strict=True):
                pending = {one[0] for one in reply}
                if len(reply) == SCRIPT_ENTRIES and not pending.issuperset(ids):
                    alone = [command("XPENDING", stream, group, i, i, 1, consumer, safe=True) for i in ids]
                    told = values((yield Batch(tuple(alone))))
                    pending = {i for i, one in zip(ids, told, strict=True) if one}
                found.append([i for i in ids if i in pending])
        return found

    def settle(self, seq: int, blocks: Sequence[int], how: str = "ack", min_idle_ms: int = 0) -> Flow[int]:
        """End those blocks, several in a round trip: ``ack``, ``release`` or ``drop``. How many jobs were touched."""
        keys = [self.manifest(seq), self.keys.stream]
        touched = 0
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            calls = [
                (script("settle_batch"), keys, list[Arg]((self.group, self.member.consumer, block, how, min_idle_ms)))
                for block in blocks[start : start + _BLOCKS_AT_ONCE]
            ]
            touched += sum(number(reply) for reply in values((yield from call_scripts(calls, safe=True))))
        return touched

    def release(
        self, seq: int, token: int, blocks: int, *, min_idle_ms: int, state: str, narrow: int = 0
    ) -> Flow[int | None]:
        """Give all back unrun, and mark the manifest. None: the token is old."""
        released = 0
        for block in range(1, max(1, blocks) + 1):
            args: list[Arg] = [token, self.group, self.member.consumer, block, min_idle_ms, state, narrow]
            keys = [self.session, self.manifest(seq), self.keys.stream]
            found = number((yield from call_script(script("release_batch"), keys, args, safe=True)))
            if found < 0:
                return None
            released += found
        return released


def _items(text: bytes | None) -> list[Item]:
    """What is no job is passed over."""
    return [(entry_id, int(before or 0)) for entry_id, before in _ITEM.findall(text or b"")]


def entries(keys: Keys, runs: Sequence[Sequence[Item]]) -> Flow[list[Entry]]:
    """The records of jobs, in one round trip; those that are gone are left out.

    Each run is of one block. New jobs were taken in one go and stand side by side in the stream: read as a range. Jobs
    that were taken over are read one by one, and so is what foreign entries in between have kept out of a range.
    """
    ranges = [run for run in runs if not any(deliveries for _, deliveries in run)]
    single = [entry_id for run in runs if any(deliveries for _, deliveries in run) for entry_id, _ in run]
    asked = [command("XRANGE", keys.stream, run[0][0], run[-1][0], "COUNT", len(run), safe=True) for run in ranges]
    asked += [command("XRANGE", keys.stream, i, i, safe=True) for i in single]
    replies = values((yield Batch(tuple(asked))))
    hidden: list[bytes] = []
    for run, records in zip(ranges, replies, strict=False):
        if len(records) == len(run) and records[-1][0] != run[-1][0]:
            seen = {record[0] for record in records}
            hidden += [entry_id for entry_id, _ in run if entry_id not in seen]
    if hidden:
        replies += values((yield Batch(tuple(command("XRANGE", keys.stream, i, i, safe=True) for i in hidden))))
    before = {entry_id: deliveries for run in runs for entry_id, deliveries in run}
    return [(i, flat, before[i]) for records in replies for i, flat in records if i in before]


def stretch(keys: Keys, items: Sequence[Item]) -> Flow[Any]:
    """What stands from the first of these jobs to the last, as the bytes of the reply where they are to be had."""
    begin, end = items[0][0], items[-1][0]
    return (yield Command(("XRANGE", keys.stream, begin, end, "COUNT", len(items)), safe=True, as_bytes=TOO_LONG))


def ended_key(run: str) -> str:
    """Says that a Spark run has ended, for the driver's process that must not guess. Not a queue's key: a run may read
    several.
    """
    return f"{{chasqui-spark}}:ended:{run}"


def tell_ended(run: str, how: str) -> Flow[None]:
    yield command("SET", ended_key(run), how, "EX", ENDED_KEEP_S, safe=True)


def how_ended(run: str) -> Flow[str]:
    """How that run ended: ``stopped`` or ``failed``; empty where nobody has told."""
    return plain((yield command("GET", ended_key(run), safe=True)))
