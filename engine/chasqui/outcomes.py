"""Outcomes of jobs, settled from blocking code: the counterpart of ``settler`` for jobs that a Spark driver has taken.

Whoever calls knows the queue and the entry ids; who holds each job is asked of the server. Only jobs that are pending
for a Spark consumer of the group are touched, so an outcome that comes twice, or late, when another worker has the job,
does nothing. Killed between two steps: what was written is settled, the rest is still pending, and the caller's next
try, or the settling of the whole batch, finds it. A reply that is lost: every call is gated and sent again.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from chasqui.errors import ChasquiError, DecodeError, ServerError
from chasqui.options import Settling
from chasqui.protocol import events
from chasqui.protocol.codec import decode_envelope, decode_name, encode_envelope
from chasqui.protocol.consume import Call, DeadLetter, Member
from chasqui.protocol.events import Alike, Line, Run
from chasqui.protocol.flow import Arg, Batch, Flow, call_script, call_scripts, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.manifests import CONSUMER_PREFIX
from chasqui.protocol.replies import fields, number, plain
from chasqui.protocol.scripts import SCRIPT_BYTES, SCRIPT_ENTRIES, script
from chasqui.redis_io import Link
from chasqui.verdicts import GiveUp, Rules, after_failure, next_run

log = logging.getLogger("chasqui.outcomes")
T = TypeVar("T")

_LOOK_AT_ONCE = 250
_SCRIPTS_AT_ONCE = 4


OK, RETRY, FAIL = "ok", "retry", "fail"


class Outcome(NamedTuple):
    """What became of one run of a job.

    ``outcome``: ``ok``, ``retry`` (the job's or the queue's rules decide when, and whether at all) or ``fail`` (give
    up). ``result``: MessagePack to be stored. ``error`` goes into the dead letter; ``reason`` into events, its first
    line where empty. ``job_id``, ``name`` and ``attempt`` are looked up where ``job_id`` is None. ``started`` tells
    that the event ``active`` was written already.
    """

    entry_id: bytes
    outcome: str
    result: bytes | None = None
    error: str = ""
    reason: str = ""
    delay_ms: int | None = None
    job_id: str | None = None
    name: str = ""
    attempt: int = 0
    duration_us: int = 0
    started: bool = False


_RUN: Callable[[Outcome], Run] = attrgetter("job_id", "name", "attempt", "duration_us")


@dataclass(frozen=True, slots=True)
class Settled:
    """How many went which way; ``gone`` were not a Spark consumer's any more."""

    done: int = 0
    retried: int = 0
    dead: int = 0
    gone: int = 0

    def __add__(self, other: Settled) -> Settled:
        return Settled(
            self.done + other.done, self.retried + other.retried, self.dead + other.dead, self.gone + other.gone
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """A job as it stands on the server: who holds it, and its record."""

    owner: str
    data: bytes
    name: bytes


class Outcomes:
    """Settles outcomes of one queue's jobs: those of any Spark consumer, or of that ``owner`` alone."""

    def __init__(self, link: Link, queue: str, rules: Settling, owner: str = CONSUMER_PREFIX) -> None:
        self._link, self._keys, self._options, self._owner = link, Keys(queue), rules, owner
        self._rules = Rules.of(rules)

    def active(self, runs: Sequence[Run]) -> None:
        """Tell that handlers start. Best effort, as all events."""
        if self._options.events_enabled:
            self._write(events.encode_runs("active", _now_ms(), runs))

    def settle(self, outcomes: Sequence[Outcome]) -> Settled:
        """Settle them; what is not a Spark consumer's is passed over."""
        try:
            return self._settle(outcomes)
        except ServerError as error:
            if "NOGROUP" not in error.message:
                raise
            log.warning("stream or group of queue %r is gone, and %d jobs with it", self._keys.queue, len(outcomes))
            return Settled(gone=len(outcomes))

    def _settle(self, outcomes: Sequence[Outcome]) -> Settled:
        done = [one for one in outcomes if one.outcome == OK]
        failed = [one for one in outcomes if one.outcome != OK] if len(done) < len(outcomes) else []
        total = Settled()
        results = any(one.result is not None for one in done)
        parts = list(slices(done, (lambda one: len(one.result or b"")) if results else None))
        for start in range(0, len(parts), _SCRIPTS_AT_ONCE):
            total += self._settle_done(parts[start : start + _SCRIPTS_AT_ONCE])
        for part in slices(failed, None):
            total += self._settle_failed(part)
        return total

    def bury(self, letters: Sequence[DeadLetter], consumer: str, group: str) -> int:
        """Move entries that are no jobs, or have no run left, to the dead letters; how many were this consumer's."""
        member = Member(self._keys, group, consumer)
        moved = 0
        for part in slices(letters, lambda letter: len(letter.data)):
            code, keys, args = member.dead_letters(part, self._options.dlq_max_stream_len)
            reply = self._link.run(call_script(code, keys, args, safe=True))
            told = [letter for letter, one in zip(part, reply, strict=True) if number(one)]
            self._events([_dlq_event(letter) for letter in told])
            moved += len(told)
        return moved

    def _settle_done(self, parts: Sequence[Sequence[Outcome]]) -> Settled:
        """A script for each part, all in one round trip. Jobs without a result need not be looked at, unless events
        want their ids.
        """
        parts = [self._named(part) for part in parts]
        replies = self._link.run(_calls([self._done(part) for part in parts]))
        ended: list[Outcome] = []
        for part, reply in zip(parts, replies, strict=True):
            ended += part if 0 not in reply else [one for one, mine in zip(part, reply, strict=True) if number(mine)]
        if self._options.events_enabled and ended:
            now_ms = _now_ms()
            unheard = [(one.job_id or "", one.name, one.attempt, None) for one in ended if not one.started]
            ends = list(map(_RUN, ended))
            self._write(events.encode_runs("active", now_ms, unheard))
            self._write(events.encode_runs("completed", now_ms, ends))
        return Settled(done=len(ended), gone=sum(map(len, parts)) - len(ended))

    def _named(self, done: Sequence[Outcome]) -> Sequence[Outcome]:
        """With ids, where events or results need them."""
        events_enabled = self._options.events_enabled
        nameless = [one.entry_id for one in done if one.job_id is None and (events_enabled or one.result is not None)]
        if not nameless:
            return done
        found = self._look(nameless)
        return [_identified(one, found.get(one.entry_id)) if one.job_id is None else one for one in done]

    def _done(self, done: Sequence[Outcome]) -> Call:
        keys, results = [self._keys.stream], list[Arg]()
        for place, one in enumerate(done, 1):
            if one.result is not None and one.job_id:
                keys.append(self._keys.result(one.job_id))
                results += [place, one.result]
        head: list[Arg] = [self._options.group, self._owner, self._options.result_ttl_secs, len(done)]
        return script("settle_done"), keys, [*head, *(one.entry_id for one in done), *results]

    def _settle_failed(self, failed: Sequence[Outcome]) -> Settled:
        found = self._look([one.entry_id for one in failed])
        retries: dict[str, list[tuple[Outcome, int, bytes]]] = {}
        dead: dict[str, list[tuple[Outcome, DeadLetter]]] = {}
        gone = 0
        for one in failed:
            record = found.get(one.entry_id)
            if record is None:
                gone += 1
                continue
            one = _identified(one, record)
            decided = self._decide(one, record)
            if isinstance(decided, DeadLetter):
                dead.setdefault(record.owner, []).append((one, decided))
            else:
                retries.setdefault(record.owner, []).append((one, *decided))
        total = Settled(gone=gone)
        for owner, moves in retries.items():
            for part in slices(moves, lambda move: len(move[2])):
                total += self._retry(Member(self._keys, self._options.group, owner), part)
        for owner, letters in dead.items():
            for some in slices(letters, lambda pair: len(pair[1].data)):
                total += self._give_up(Member(self._keys, self._options.group, owner), some)
        return total

    def _decide(self, one: Outcome, record: _Found) -> DeadLetter | tuple[int, bytes]:
        """A dead letter, or the wait and the member for the delayed set."""
        try:
            envelope = decode_envelope(record.data)
        except DecodeError:
            return DeadLetter(one.entry_id, record.data, b"", "decode_failed", 0)
        verdict = after_failure(
            self._rules,
            envelope.attempt + 1,
            envelope.retry,
            unrecoverable=one.outcome == FAIL,
            asked_ms=one.delay_ms,
            jitter=random.random(),
        )
        if isinstance(verdict, GiveUp):
            return DeadLetter(
                one.entry_id,
                encode_envelope(envelope),
                record.name,
                verdict.reason,
                envelope.attempt + 1,
                envelope.id,
                error=one.error,
            )
        return verdict.wait_ms, next_run(decode_name(record.name), envelope)

    def _retry(self, member: Member, moves: Sequence[tuple[Outcome, int, bytes]]) -> Settled:
        code, keys, args = member.retries((one.entry_id, wait_ms, data) for one, wait_ms, data in moves)
        reply = self._link.run(call_script(code, keys, args, safe=True))
        told: list[_Event] = []
        for (one, wait_ms, _), moved in zip(moves, reply, strict=True):
            if number(moved):
                extras = ("attempt", one.attempt + 2, "backoff_ms", wait_ms)
                told += [*_failed_events(one), ("retry-scheduled", one.job_id or "", one.name, extras)]
        self._events(told)
        moved_now = sum(number(moved) for moved in reply)
        return Settled(retried=moved_now, gone=len(moves) - moved_now)

    def _give_up(self, member: Member, letters: Sequence[tuple[Outcome, DeadLetter]]) -> Settled:
        code, keys, args = member.dead_letters((letter for _, letter in letters), self._options.dlq_max_stream_len)
        reply = self._link.run(call_script(code, keys, args, safe=True))
        told: list[_Event] = []
        for (one, letter), moved in zip(letters, reply, strict=True):
            if number(moved):
                told += [*_failed_events(one), _dlq_event(letter)]
        self._events(told)
        moved_now = sum(number(moved) for moved in reply)
        return Settled(dead=moved_now, gone=len(letters) - moved_now)

    def _look(self, ids: Sequence[bytes]) -> dict[bytes, _Found]:
        """Those of the entries that a Spark consumer holds, with their records."""
        found: dict[bytes, _Found] = {}
        for start in range(0, len(ids), _LOOK_AT_ONCE):
            some = ids[start : start + _LOOK_AT_ONCE]
            found |= self._link.run(_look(self._keys, self._options.group, some, self._owner))
        return found

    def _events(self, told: Sequence[_Event]) -> None:
        if self._options.events_enabled and told:
            now_ms = _now_ms()
            self._write([events.encode(name, job_id, now_ms, job, extras) for name, job_id, job, extras in told])

    def _write(self, lines: Alike | list[Line]) -> None:
        try:
            self._link.run(events.write(self._keys, lines, self._options.events_max_stream_len))
        except ChasquiError as error:
            log.warning("%d events were not written: %s", len(lines), error.message)


_Event = tuple[str, str, str, tuple[str | int, ...]]


def _failed_events(one: Outcome) -> Iterator[_Event]:
    reason = one.reason or one.error.partition("\n")[0]
    if not one.started:
        yield "active", one.job_id or "", one.name, ("attempt", one.attempt + 1)
    extras = ("attempt", one.attempt + 1, "reason", reason[:1024], "duration_us", one.duration_us)
    yield "failed", one.job_id or "", one.name, extras


def _dlq_event(letter: DeadLetter) -> _Event:
    return "dlq", letter.job_id, decode_name(letter.name), ("attempt", letter.attempt, "reason", letter.reason)


def _identified(one: Outcome, record: _Found | None) -> Outcome:
    """With the job's id, name and attempt, for events and results; the id is empty where its bytes are no job."""
    if one.job_id is not None:
        return one
    if record is None:
        return one._replace(job_id="")
    try:
        envelope = decode_envelope(record.data)
    except DecodeError:
        return one._replace(job_id="")
    return one._replace(job_id=envelope.id, name=decode_name(record.name), attempt=envelope.attempt)


def _calls(calls: Sequence[Call]) -> Flow[list[Any]]:
    return values((yield from call_scripts(calls, safe=True)))


def _look(keys: Keys, group: str, ids: Sequence[bytes], prefix: str) -> Flow[dict[bytes, _Found]]:
    asked = [command("XPENDING", keys.stream, group, i, i, 1, safe=True) for i in ids]
    asked += [command("XRANGE", keys.stream, i, i, safe=True) for i in ids]
    replies = values((yield Batch(tuple(asked))))
    found: dict[bytes, _Found] = {}
    for entry_id, pending, record in zip(ids, replies[: len(ids)], replies[len(ids) :], strict=True):
        if pending and record:
            owner = plain(pending[0][1])
            if owner.startswith(prefix):
                flat = fields(record[0][1])
                found[entry_id] = _Found(owner, flat.get(b"d", b""), flat.get(b"n", b""))
    return found


def slices(items: Sequence[T], size: Callable[[T], int] | None) -> Iterator[Sequence[T]]:
    """Cut so that each part fits one call of a script: a thousand items and, unless one alone is larger, a megabyte."""
    if size is None:
        yield from (items[start : start + SCRIPT_ENTRIES] for start in range(0, len(items), SCRIPT_ENTRIES))
        return
    start = total = 0
    for i, item in enumerate(items):
        more = size(item)
        if i > start and (i - start == SCRIPT_ENTRIES or total + more > SCRIPT_BYTES):
            yield items[start:i]
            start, total = i, 0
        total += more
    if start < len(items):
        yield items[start:]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
