"""The events stream: what happened to jobs, written by workers and promoters, read by whoever wants to know.

An entry holds text only, its fields in this order: ``e`` (what happened), ``id`` (of the job; empty where there is
none), ``ts`` (the writer's clock, epoch ms), ``n`` (the job's name, left out when empty), then the event's own:

    waiting                                          promoted from the delayed set
    active           attempt                         a handler starts; runs are counted from 1
    completed        attempt, duration_us
    failed           attempt, reason, duration_us
    retry-scheduled  attempt, backoff_ms             the attempt is that of the run to come
    dlq              attempt, reason
    drained                                          a reader found nothing more; its ``id`` is empty
    delayed          delay_ms                        in the format, but nobody writes it

Events are best effort. Writing them is not repeated after a lost reply, because nothing would tell the doubles apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from chasqui.protocol.bulk import bulks
from chasqui.protocol.codec import decode_name
from chasqui.protocol.flow import Arg, Fed, Feed, Flow, Refusal, call_scripts, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import fields, plain
from chasqui.protocol.scripts import SCRIPT_ENTRIES, script
from chasqui.protocol.slots import REDIRECTIONS

PIECE_EVENTS = 250
READ_EVENTS = 100
BEGINNING = "0-0"

Line = tuple[int, bytes]
"""An event ready to be sent: the number of its arguments, and these as protocol bytes."""

_NUMBERS = frozenset({b"attempt", b"backoff_ms", b"delay_ms", b"duration_us"})
_OWN = frozenset({b"e", b"id", b"ts", b"n"})
_U64_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job, or to the queue.

    ``name`` is what happened, such as ``completed``; ``job_id`` is None where no job is meant. ``ts_ms`` is the
    writer's clock. ``fields`` holds the rest by name: numbers as int, everything else as text. ``entry_id`` is the
    place in the stream, from which reading can go on.
    """

    name: str
    job_id: str | None
    job_name: str
    ts_ms: int
    fields: dict[str, int | str]
    entry_id: str


def encode(event: str, job_id: str, ts_ms: int, name: str, extras: Sequence[str | int] = ()) -> Line:
    """An event as protocol bytes: how many arguments, and they themselves. ``extras`` are fields and values in turn.

    Bytes at once, because a busy worker writes two events a job: as plain commands they cost the server a quarter of
    what they cost it inside a script, and made this way they cost the worker no more than a list of fields.
    """
    out = [_head(event), _text(job_id), b"$2\r\nts\r\n", _number_text(ts_ms)]
    if name:
        out.append(_name(name))
    for i in range(0, len(extras), 2):
        value = extras[i + 1]
        out.append(_field(extras[i]))
        out.append(_number_text(value) if type(value) is int else _text(str(value)))
    return 2 * (4 if name else 3) + len(extras), b"".join(out)


def encode_run(event: str, job_id: str, ts_ms: int, name: str, attempt: int, duration_us: int | None = None) -> Line:
    """``active`` and ``completed``, which every job has: the same bytes as from ``encode``, in a third of the time."""
    count, head, tail = _run_frame(event, name, attempt)
    data = job_id.encode(errors="replace")
    if duration_us is None:
        return count, b"%b$%d\r\n%b\r\n%b%b" % (head, len(data), data, _ts(ts_ms), tail)
    took = b"%d" % duration_us
    return count + 2, b"%b$%d\r\n%b\r\n%b%b$11\r\nduration_us\r\n$%d\r\n%b\r\n" % (
        *(head, len(data), data, _ts(ts_ms), tail),
        *(len(took), took),
    )


Run: TypeAlias = tuple[str, str, int, int | None]
"""What ``active`` and ``completed`` tell of a job: its id, its name, its runs before this one, and how long it took."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Events of a batch that differ in the job's id only. They travel as ids, at a fifth of what single ones cost."""

    event: str
    fields: tuple[Arg, ...]
    ids: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.ids)


def encode_runs(event: str, ts_ms: int, runs: Sequence[Run]) -> Alike | list[Line]:
    """``encode_run`` for many that started, or ended, at the same time."""
    if not runs:
        return []
    # Column by column: as slices of each run this took four times as long.
    ids, *rest = zip(*runs, strict=True)
    if all(len(set(column)) == 1 for column in rest):
        _, name, before, duration_us = runs[0]
        named: tuple[Arg, ...] = ("n", name.encode(errors="replace")) if name else ()
        took: tuple[Arg, ...] = () if duration_us is None else ("duration_us", duration_us)
        try:
            packed = list(map(str.encode, ids))
        except UnicodeEncodeError:
            packed = [job_id.encode(errors="replace") for job_id in ids]
        return Alike(event, ("ts", ts_ms, *named, "attempt", before + 1, *took), packed)
    return [encode_run(event, job_id, ts_ms, name, before + 1, took) for job_id, name, before, took in runs]


@lru_cache(4096)
def _run_frame(event: str, name: str, attempt: int) -> tuple[int, bytes, bytes]:
    tail = (_name(name) if name else b"") + bulks(b"attempt", b"%d" % attempt)
    return 10 if name else 8, _head(event), tail


@lru_cache(16)
def _ts(ts_ms: int) -> bytes:
    return bulks(b"ts", b"%d" % ts_ms)


def write(keys: Keys, lines: Sequence[Line] | Alike, max_len: int) -> Flow[None]:
    """Append encoded events in order, and trim once at the end: ``~`` is no exact cap anyway.

    Not sent again after a lost connection: nothing would tell an event from its double. Where the queue moved to
    another node of the cluster half way, the rest goes there.
    """
    if isinstance(lines, Alike):
        yield from _write_alike(keys, lines, max_len)
        return
    left = list(lines)
    while left:
        fed: Fed = yield Feed(keys.events, _pieces_of(keys, left, max_len))
        problems = [reply for reply in fed.replies if reply is not None]
        rest = [left[i] for i in range(len(left)) if i >= len(fed.replies) or fed.replies[i] is not None]
        moved = len(rest) < len(left) and {problem.code for problem in problems} <= REDIRECTIONS
        if problems and not (moved and fed.broken is None):
            raise problems[0]
        if fed.broken is not None:
            raise fed.broken
        left = rest


def _write_alike(keys: Keys, alike: Alike, max_len: int) -> Flow[None]:
    head: list[Arg] = [max_len, alike.event, len(alike.fields), *alike.fields]
    parts = [alike.ids[start : start + SCRIPT_ENTRIES] for start in range(0, len(alike.ids), SCRIPT_ENTRIES)]
    values((yield from call_scripts([(script("add_events"), [keys.events], [*head, *part]) for part in parts])))


def _pieces_of(keys: Keys, lines: Sequence[Line], max_len: int) -> Callable[[], Iterator[tuple[bytes, int]]]:
    key = keys.events.encode()

    def pieces() -> Iterator[tuple[bytes, int]]:
        heads: dict[int, bytes] = {}
        for start in range(0, len(lines), PIECE_EVENTS):
            out: list[bytes] = []
            for count, body in lines[start : start + PIECE_EVENTS]:
                head = heads.get(count)
                if head is None:
                    xadd = bulks(b"XADD", key, b"*")
                    head = heads[count] = b"*%d\r\n%b" % (count + 3, xadd)
                out.append(head)
                out.append(body)
            yield b"".join(out), len(out) // 2
        yield b"*5\r\n" + bulks(b"XTRIM", key, b"MAXLEN", b"~", b"%d" % max_len), 1

    return pieces


def _text(value: str) -> bytes:
    # A lone surrogate, as in the message of an error about a file name, must not cost the event.
    data = value.encode(errors="replace")
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _number_text(value: int) -> bytes:
    digits = b"%d" % value
    return b"$%d\r\n%b\r\n" % (len(digits), digits)


@lru_cache(64)
def _head(event: str) -> bytes:
    return bulks(b"e", event.encode(), b"id")


@lru_cache(64)
def _field(name: str | int) -> bytes:
    return _text(str(name))


@lru_cache(1024)
def _name(name: str) -> bytes:
    return bulks(b"n") + _text(name)


def last_id(keys: Keys) -> Flow[str]:
    """The highest id that the stream has given out, whether or not that entry is still there."""
    try:
        about = yield command("XINFO", "STREAM", keys.events, safe=True)
    except Refusal as refusal:
        if refusal.code == "ERR" and "no such key" in refusal.text:
            return BEGINNING
        raise
    return plain(fields(about).get(b"last-generated-id")) or BEGINNING


def read(keys: Keys, after: str, block_ms: int) -> Flow[list[Event]]:
    """The next events after an id; waits up to ``block_ms`` for the first of them, or with 0 not at all."""
    # BLOCK 0 would mean for ever.
    block: tuple[Arg, ...] = ("BLOCK", block_ms) if block_ms > 0 else ()
    reply = yield command(
        "XREAD", "COUNT", READ_EVENTS, *block, "STREAMS", keys.events, after, safe=True, wait_ms=block_ms
    )
    return [parse(entry) for entry in reply[0][1]] if reply else []


def parse(entry: Any) -> Event:
    """A stream entry as an event. Total: what a foreign writer left out is empty, what is not text is made readable.

    An event without a readable ``ts`` gets the time at which the server took it; the odd text stays in ``fields``.
    """
    entry_id, found = plain(entry[0]), fields(entry[1])
    rest: dict[str, int | str] = {}
    for key, value in found.items():
        if key in _NUMBERS:
            number = _number(value)
            rest[key.decode()] = plain(value) if number is None else number
        elif key not in _OWN:
            rest[plain(key)] = plain(value)
    written = found.get(b"ts")
    ts_ms = _number(written)
    if ts_ms is None:
        ts_ms = id_parts(entry_id)[0]
        if written is not None:
            rest["ts"] = plain(written)
    return Event(
        plain(found.get(b"e")), plain(found.get(b"id")) or None, decode_name(found.get(b"n")), ts_ms, rest, entry_id
    )


def resume_from(position: str, tail: str, seen: Collection[str]) -> str:
    """Where a reader at ``position`` goes on in a stream whose highest id is ``tail``; ``seen`` are ids it has had.

    A tail before the position means that this is not the stream we read, or a copy that lacks its end: a server that
    lost its last second, or a replica that took over. The first has to be read from its beginning; in the second we
    know everything up to its tail. An id we have seen tells the two apart. What remains unclear is read again: an
    event that comes twice has the same id, one that is missed has no way to be noticed.
    """
    if id_parts(tail) >= id_parts(position):
        return position
    return tail if tail in seen else BEGINNING


def id_parts(entry_id: str) -> tuple[int, int]:
    """Milliseconds and sequence number of an entry's id, which is what ids are ordered by."""
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)


def _number(raw: bytes | None) -> int | None:
    """What these bytes mean as a decimal number; None where they are none."""
    if raw is None:
        return None
    digits = raw[1:] if raw[:1] == b"-" else raw
    return int(raw) if digits.isdigit() and len(digits) <= _U64_DIGITS else None
