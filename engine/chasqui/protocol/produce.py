"""Adding and cancelling jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from chasqui.errors import BulkInterrupted, ChasquiError, ConnectionLost, QueueFull
from chasqui.protocol.bulk import Bulk
from chasqui.protocol.flow import Arg, Command, Fed, Feed, Flow, Pause, Refusal, call_script, call_scripts, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import number
from chasqui.protocol.scripts import SCRIPT_BYTES, script
from chasqui.protocol.slots import REDIRECTIONS

T = TypeVar("T")

# The server refused these before doing anything, for reasons that pass: sending again is always right. A replica passes
# where the address leads to another server soon: after a failover.
PASSING = frozenset({"LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "MOVED", "ASK", "BUSY", "READONLY"})
# A lost reply is a matter of seconds. What is due so much later has not moved on when it is sent again; nearer than
# that the promoter may have taken it, and the second time would be a second job.
RESEND_MS = 60_000
# Ids of ours, among jobs with ids of the caller's: kept only as long as a call may be sent again.
OWN_MARKER_TTL_S = 600
_UNIQUE_JOBS = 250
# Enough on the way that the server never waits for us, little enough that its answers are read while it works.
_UNANSWERED = 2000
_FIRST_WAIT_MS, _LONGEST_WAIT_MS = 10, 500


@dataclass(frozen=True, slots=True)
class Room:
    """What happens at the cap: refuse at ``cap`` (0: never), wait up to ``block_ms`` for room, or ``trim`` to it."""

    cap: int
    trim: int
    block_ms: int

    @classmethod
    def of(cls, max_stream_len: int, overflow: str, block_timeout: int) -> Room:
        """Refusing starts at 0.9 of the cap: native writers on the same queue trim at the cap itself, and a queue
        filled to the brim would lose waiting jobs to the first of their promotions.
        """
        if overflow == "trim":
            return cls(0, max_stream_len, 0)
        return cls(max(1, max_stream_len * 9 // 10), 0, block_timeout if overflow == "block" else 0)


@dataclass(frozen=True, slots=True)
class UniqueJob:
    """A job with an id of the caller's. ``data`` is the envelope, or with ``run_at_ms`` the delayed member."""

    id: str
    data: bytes
    name: bytes
    marker_ttl_s: int
    run_at_ms: int | None


def marker_ttl_s(delay_ms: int, dedup_ttl_ms: int) -> int:
    """How long an id stays taken: ``dedup_ttl``, and for a delayed job never less than ChasquiMQ keeps it."""
    native = max(1, delay_ms // 1000) + 3600 if delay_ms > 0 else 0
    return max(native, -(-dedup_ttl_ms // 1000))


def add(keys: Keys, room: Room, envelope: bytes, name: bytes) -> Flow[None]:
    """One job without an id. Not sent again after a lost reply: nothing would tell the two apart."""
    args: list[Arg] = [room.cap, room.trim, envelope, name]
    yield from _when_room(keys, room, lambda: call_script(script("add_job"), [keys.stream], args))


def add_delayed(keys: Keys, run_at_ms: int, member: bytes, now_ms: int) -> Flow[None]:
    """One delayed job. The member holds a fresh id, so adding it again changes nothing, as long as it is there."""
    yield Command(("ZADD", keys.delayed, run_at_ms, member), safe=run_at_ms - now_ms >= RESEND_MS)


def add_unique(keys: Keys, room: Room, jobs: Sequence[UniqueJob]) -> Flow[list[bool]]:
    """Jobs with ids; True for those that were added now. Sent again after a lost reply: their markers tell."""
    added: list[bool] = []
    for chunk in _unique_chunks(jobs):
        # Only the first chunk looks at the cap: a bulk is refused whole or not at all.
        limits = room if not added else Room(0, room.trim, 0)
        call = _unique_call(keys, limits, chunk)
        try:
            reply = yield from _when_room(keys, limits, call)
        except (Refusal, ConnectionLost) as error:
            if not added:
                raise
            unknown = len(chunk) if isinstance(error, ConnectionLost) else 0
            raise _interrupted(error, range(len(added)), unknown, [job.id for job in jobs]) from error
        added += [number(flag) == 1 for flag in reply]
    return added


def _unique_chunks(jobs: Sequence[UniqueJob]) -> list[list[UniqueJob]]:
    chunks: list[list[UniqueJob]] = []
    size = 0
    for job in jobs:
        if not chunks or len(chunks[-1]) == _UNIQUE_JOBS or size + len(job.data) > SCRIPT_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(job)
        size += len(job.data)
    return chunks


def _unique_call(keys: Keys, room: Room, jobs: list[UniqueJob]) -> Callable[[], Flow[Any]]:
    names = [keys.stream, keys.delayed]
    args: list[Arg] = [room.cap, room.trim]
    for job in jobs:
        names += [keys.dedup(job.id), keys.delayed_index(job.id)]
        args += ["" if job.run_at_ms is None else job.run_at_ms, job.marker_ttl_s, job.data, job.name]
    return lambda: call_script(script("add_unique"), names, args, safe=True)


def add_bulk(keys: Keys, room: Room, bulk: Bulk, attempts: int) -> Flow[int | None]:
    """A bulk without ids of the caller's. The cap, if any, is looked at once, before the first job; returns the length
    that was seen then.

    What the server refused for a passing reason is sent again. After a lost connection so are delayed jobs that are far
    from due, because a member added twice is there once; of others nothing tells which of the unanswered are in, so the
    error does.

    A job refused in front of one that got in would change places with it if it was sent again: the error tells, and
    the caller decides. Redirections are the exception: a queue that moves within a cluster must not fail a call.
    """
    stream = bulk.run_at_ms is None
    once = min(bulk.run_at_ms or [0]) - bulk.created_at_ms < RESEND_MS
    length = (yield from _check_room(keys, room)) if stream and room.cap else None
    left: Sequence[int] = range(len(bulk))
    unanswered: set[int] = set()  # of those left: sent, and what became of them is not known
    failures = 0
    while True:
        fed: Fed = yield Feed(keys.stream, _pieces_of(bulk, left), window=_UNANSWERED)
        refused = fed.first_refused()
        problem = fed.replies[refused] if refused < len(fed.replies) else fed.broken
        if problem is None:
            return length
        failures = 0 if None in fed.replies else failures
        unanswered |= {*left[len(fed.replies) : fed.sent]}
        again = problem.code in PASSING and not fed.final if isinstance(problem, Refusal) else True
        if None in fed.replies[refused:]:
            again = again and {reply.code for reply in fed.replies if reply is not None} <= REDIRECTIONS
            left = [left[i] for i in range(len(left)) if i >= len(fed.replies) or fed.replies[i] is not None]
        else:
            left = left[refused:]
        unanswered &= {*left}  # one refused now may be in from a try before; one that was taken now is no riddle
        if not again or failures == attempts or (once and unanswered):
            added = sorted({*range(len(bulk))} - {*left})
            raise _interrupted(problem, added, len(unanswered), bulk.ids)
        yield Pause(attempt=failures)
        failures += 1


def add_bulks(keys: Keys, room: Room, bulks: Sequence[Bulk], attempts: int) -> Flow[int | None]:
    """The parts of one call, one after the other; an error tells of all of them."""
    length = None
    done: list[Bulk] = []
    for bulk in bulks:
        try:
            seen = yield from add_bulk(keys, room, bulk, attempts)
            length = seen if length is None else length
        except BulkInterrupted as error:
            added = [*_ids_of(done), *error.added]
            raise _stopped(error.__cause__ or error, added, error.unknown, _ids_of(bulks)) from error.__cause__
        except (ChasquiError, Refusal) as error:
            if not done:
                raise
            raise _stopped(error, _ids_of(done), 0, _ids_of(bulks)) from error
        done.append(bulk)
    return length


def _ids_of(bulks: Sequence[Bulk]) -> list[str]:
    return [job_id for bulk in bulks for job_id in bulk.ids]


def _pieces_of(bulk: Bulk, left: Sequence[int]) -> Callable[[], Iterator[tuple[bytes, int]]]:
    if isinstance(left, range):
        return lambda: bulk.pieces(left.start)
    return lambda: bulk.only(left).pieces(0)


def _check_room(keys: Keys, room: Room) -> Flow[int]:
    """How long the stream is, when it is below the cap; waits for that as long as it may, else QueueFull."""
    waited = 0
    while True:
        length = number((yield Command(("XLEN", keys.stream), safe=True)))
        if length < room.cap:
            return length
        waited = yield from _wait_for_room(keys, room, waited)


def _interrupted(error: Exception, added: Sequence[int], unknown: int, ids: Sequence[str]) -> Exception:
    """The error of a bulk that stopped half way; the plain one where nothing had been added."""
    if not added and not unknown:
        return error
    return _stopped(error, [ids[i] for i in added], unknown, ids)


def _stopped(error: BaseException, added: Sequence[str], unknown: int, ids: Sequence[str]) -> BulkInterrupted:
    why = error.message if isinstance(error, ChasquiError) else str(error)
    bulk = BulkInterrupted(
        f"the bulk of {len(ids)} jobs stopped: {len(added)} are added, {unknown} more may be, the rest not ({why}); "
        f"add the rest again, and give ids of your own where a doubled job would hurt",
        added=added,
        unknown=unknown,
        ids=ids,
    )
    bulk.__cause__ = error
    return bulk


def cancel_delayed(keys: Keys, ids: Sequence[str]) -> Flow[list[bool]]:
    """Take delayed jobs out by id; True for those that were still there.

    Not sent again after a lost reply: the second answer would be False for a job that the first call took out.
    """
    cancel = script("cancel_delayed")
    replies = yield from call_scripts([(cancel, [keys.delayed, keys.delayed_index(i), keys.dedup(i)], []) for i in ids])
    return [number(reply) == 1 for reply in values(replies)]


def _when_room(keys: Keys, room: Room, call: Callable[[], Flow[Any]]) -> Flow[Any]:
    waited = 0
    while True:
        reply = yield from call()
        if isinstance(reply, list) or number(reply) != -1:
            return reply
        waited = yield from _wait_for_room(keys, room, waited)


def _wait_for_room(keys: Keys, room: Room, waited: int) -> Flow[int]:
    """Wait a little longer each time; QueueFull when the time is up."""
    left = room.block_ms - waited
    if left <= 0:
        how = f" after {room.block_ms} ms of waiting" if room.block_ms else ""
        raise QueueFull(
            f"queue {keys.queue!r} holds {room.cap} jobs or more{how}; nothing was added. Let workers drain it, raise "
            f"max_stream_len, or choose another overflow"
        )
    pause = min(left, max(_FIRST_WAIT_MS, min(waited, _LONGEST_WAIT_MS)))
    yield Pause(pause)
    return waited + pause
