"""Looking at queues from outside: where streams stand, their entries in pages, and everything else that can be listed.

Nothing here changes anything: every command reads, scripts run by EVALSHA_RO where the server has it, and all of it may
be sent again after a lost reply.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from chasqui.protocol.flow import Arg, Batch, Command, Flow, Refusal, TooLong, call_script, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import number, parsed, plain
from chasqui.protocol.scripts import SCRIPT_BYTES, SCRIPT_ENTRIES, Script, script

BEGINNING = "0-0"
SEQUENCES = 2**64 - 1
LAST = f"{SEQUENCES}-{SEQUENCES}"
GUESSES = 15
SCAN_COUNT = 1000
# A page is what lies in memory at a time: so many entries at most, and about so many bytes. How many entries that is
# follows from the page before, so that one may be far too long: it is asked for again, as a shorter one.
PAGE_ENTRIES = 4000
PAGE_BYTES = 4 << 20
TOO_LONG = 4 * PAGE_BYTES
SHORTER = 16
STEADY_PAGES = 16
FIRST_PAGE = 64
# Pages that are parsed at once after one whose bytes were looked at in vain: where there is one there are more.
PARSED_AFTER_MISS = 8

Entry: TypeAlias = tuple[bytes, list[bytes]]
"""A stream entry as it comes: its id, then fields and values in turn."""

Id: TypeAlias = tuple[int, int]
"""An entry's id as numbers, by which ids are ordered: milliseconds and sequence number."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream stands. Redis before 7.0 tells neither ``added`` nor ``max_deleted``: they are None.

    ``last_id`` is the highest id ever given out, whether or not that entry is still there; ``first_id`` is that of the
    oldest entry that is, None in an empty stream. ``added`` counts the entries there ever were. ``max_deleted`` is the
    highest id that XDEL removed; trimming does not raise it.
    """

    last_id: str = BEGINNING
    length: int = 0
    first_id: str | None = None
    added: int | None = 0
    max_deleted: str | None = BEGINNING
    exists: bool = False


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a walk came: entries and bytes passed, the id of the last one, and the ids that stand at each step."""

    entries: int
    size: int
    last_id: str | None
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What stands around a guessed id: the nearest entries, and how many stand from each to another further away."""

    before: Id | None
    before_from: Id | None
    before_count: int
    at: Id | None
    at_to: Id | None
    at_count: int


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """A job that a worker has taken and not settled."""

    entry_id: str
    consumer: str
    idle_ms: int
    deliveries: int


def id_parts(entry_id: str) -> Id:
    """Milliseconds and sequence number of an entry's id. An id without sequence number is the first of its time."""
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)


def id_text(parts: Id) -> str:
    return f"{parts[0]}-{parts[1]}"


def predecessor(parts: Id) -> Id:
    """The greatest id that is lower: reading behind it begins with this one."""
    ms, sequence = parts
    if sequence > 0:
        return ms, sequence - 1
    return (ms - 1, SEQUENCES) if ms > 0 else (0, 0)


def successor(parts: Id) -> Id:
    """The lowest id that is greater."""
    ms, sequence = parts
    return (ms, sequence + 1) if sequence < SEQUENCES else (ms + 1, 0)


def positions(keys: Sequence[str]) -> Flow[list[Position | Refusal]]:
    """Where these streams stand: one command each, one round trip. A key of another type is a refusal in the list."""
    replies = yield Batch(tuple(command("XINFO", "STREAM", key, safe=True) for key in keys))
    return [_position(reply) for reply in replies]


def _position(reply: Any) -> Position | Refusal:
    if isinstance(reply, Refusal):
        if reply.code == "ERR" and "no such key" in reply.text:
            return Position()
        if reply.code != "WRONGTYPE":
            raise reply
        return reply
    about = dict(zip(reply[::2], reply[1::2], strict=False))
    first, added, deleted = about.get(b"first-entry"), about.get(b"entries-added"), about.get(b"max-deleted-entry-id")
    return Position(
        last_id=plain(about.get(b"last-generated-id")) or BEGINNING,
        length=number(about.get(b"length")),
        first_id=plain(first[0]) if first else None,
        added=None if added is None else number(added),
        max_deleted=None if deleted is None else plain(deleted),
        exists=True,
    )


def grown(keys: Sequence[str], after: Sequence[str]) -> Flow[bool]:
    """Whether an entry stands behind one of these ids; no entry is told where there is none. A key that cannot be read
    has none: ``positions`` says what is wrong with it.
    """
    replies = yield Batch(
        tuple(
            command("XRANGE", key, behind(at), "+", "COUNT", 1, safe=True)
            for key, at in zip(keys, after, strict=True)
            if at != LAST
        )
    )
    return any(isinstance(reply, list) and reply for reply in replies)


def behind(after: str) -> str:
    """The begin of a range behind an id."""
    return "-" if after == BEGINNING else f"({after}"


def page(key: str, after: str, upto: str, count: int) -> Flow[tuple[list[Any] | bytes, int]]:
    """The next entries behind an id, up to and including another, and how many were asked for in the end."""
    while True:
        args: tuple[Arg, ...] = ("XRANGE", key, behind(after), upto, "COUNT", count)
        found = yield Command(args, safe=True, as_bytes=TOO_LONG if count > 1 else sys.maxsize)
        if not isinstance(found, TooLong):
            return found, count
        count = max(1, count // SHORTER)


def walk(
    key: str, after: str, upto: str, *, entries: int | None = None, size: int | None = None, step: int = SCRIPT_ENTRIES
) -> Flow[Walk]:
    """How far so many entries, or bytes, reach; both without limit go to ``upto``. Slice by slice, so that no call
    stops the server for long.
    """
    walked = passed = 0
    marks: list[str] = []
    last: str | None = None
    while True:
        left = SCRIPT_ENTRIES if entries is None else min(SCRIPT_ENTRIES, entries - walked)
        room = SCRIPT_BYTES if size is None else min(SCRIPT_BYTES, size - passed)
        if left <= 0 or room <= 0 or (last or after) in (upto, LAST):
            break
        reply = yield from read_script(
            script("walk_stream"), [key], [last or after, upto, left, room, step, walked % step]
        )
        if number(reply[0]) == 0:
            break
        walked += number(reply[0])
        passed += number(reply[1])
        last = plain(reply[2])
        marks += map(plain, reply[3])
    return Walk(walked, passed, last, tuple(marks))


def probe(key: str, after: str, upto: str, guesses: Sequence[Id]) -> Flow[list[Sample]]:
    """What stands around these ids, in the range behind ``after`` and up to ``upto``."""
    first = id_text(successor(id_parts(after)))
    samples: list[Sample] = []
    for start in range(0, len(guesses), GUESSES):
        some: list[Arg] = [id_text(guess) for guess in guesses[start : start + GUESSES]]
        reply = yield from read_script(script("probe_stream"), [key], [first, upto, *some])
        samples += [
            Sample(_id(one[0]), _id(one[1]), number(one[2]), _id(one[3]), _id(one[4]), number(one[5])) for one in reply
        ]
    return samples


def _id(raw: Any) -> Id | None:
    return id_parts(plain(raw)) if raw else None


def read_script(source: Script, keys: list[str], args: list[Arg]) -> Flow[Any]:
    """Run a script such that the server itself makes sure that it only reads; Redis before 7.0 has no such way."""
    rest: tuple[Arg, ...] = (len(keys), *keys, *args)
    try:
        return (yield Command(("EVALSHA_RO", source.sha, *rest), safe=True))
    except Refusal as refusal:
        if refusal.code == "NOSCRIPT":
            return (yield Command(("EVAL_RO", source.source, *rest), safe=True))
        if "unknown command" not in refusal.text.lower() and refusal.code != "NOPERM":
            raise
    return (yield from call_script(source, keys, args, safe=True))


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A key of another type than it should have."""

    key: str
    found: str
    wanted: str


def first_misplaced(view: str, queues: Sequence[Keys], group: str) -> Flow[Misplaced | None]:
    """Ask each queue for what the view needs, such that next to nothing is told: the server checks types and rights all
    the same. Gives the first key of another type; what is not allowed is raised.
    """
    asked = [one for keys in queues for one in _harmless(view, keys, group)]
    replies = yield Batch(tuple(one for one, _ in asked))
    for (one, wanted), reply in zip(asked, replies, strict=True):
        if not isinstance(reply, Refusal) or reply.code == "NOGROUP" or "no such key" in reply.text:
            continue
        if reply.code != "WRONGTYPE":
            raise reply
        key = str(one.args[2] if one.args[0] == "XINFO" else one.args[1])
        try:
            found = plain((yield command("TYPE", key, safe=True)))
        except Refusal:
            found = "something else"
        return Misplaced(key, found, wanted)
    return None


def _harmless(view: str, keys: Keys, group: str) -> list[tuple[Command, str]]:
    """Commands of that view that tell next to nothing, and the type that their keys should have."""

    def stream(key: str) -> tuple[Command, str]:
        return command("XRANGE", key, "+", "-", safe=True), "stream"

    def sorted_set(key: str) -> tuple[Command, str]:
        return command("ZRANGEBYSCORE", key, 1, 0, safe=True), "zset"

    pending = command("XPENDING", keys.stream, group, safe=True), "stream"
    return {
        "jobs": [stream(keys.stream)],
        "events": [stream(keys.events)],
        "dlq": [stream(keys.dlq)],
        "pending": [pending],
        "delayed": [sorted_set(keys.delayed)],
        "repeatable": [(command("ZRANGE", keys.repeat, 1, 0, safe=True), "zset")],
        "results": [(command("EXISTS", keys.result(""), safe=True), "string")],
        "stats": [stream(keys.stream), pending, sorted_set(keys.delayed), stream(keys.dlq)],
    }[view]


def matching(pattern: bytes, route: str | None) -> Flow[list[bytes]]:
    """All keys of one server that match a glob. Keys that are there all the time are found; some perhaps twice."""
    found: list[bytes] = []
    cursor: Any = b"0"
    while True:
        reply = yield command("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT, safe=True, route=route)
        cursor = reply[0]
        found += reply[1]
        if number(cursor) == 0:
            return found


def scanned(pattern: bytes, cursor: Any, route: str | None) -> Flow[tuple[Any, list[bytes]]]:
    """One step of such a walk: the next cursor, b"0" at the end, and what was found."""
    reply = yield command("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT, safe=True, route=route)
    return reply[0], list(reply[1])


def escaped(text: str) -> bytes:
    """That text, and nothing else, as a glob."""
    return "".join(f"\\{c}" if c in "*?[]^\\" else c for c in text).encode()


def matches(pattern: str, text: str) -> bool:
    """Whether a glob matches a text as in SCAN: byte by byte, with ``*``, ``?``, ``[a-z]``, ``[^a]``, and a backslash
    before a sign that stands for itself. Takes at most as many steps as the two lengths multiplied.
    """
    signs, data = _glob(pattern.encode(errors="surrogatepass")), text.encode(errors="surrogatepass")
    at = i = 0
    star: tuple[int, int] | None = None
    while i < len(data):
        if at < len(signs) and signs[at] is None:
            star, at = (at, i), at + 1
        elif at < len(signs) and data[i] in (signs[at] or ()):
            at, i = at + 1, i + 1
        elif star is not None:
            # The last star takes one byte more.
            star = (star[0], star[1] + 1)
            at, i = star[0] + 1, star[1]
        else:
            return False
    return all(sign is None for sign in signs[at:])


def _glob(pattern: bytes) -> list[frozenset[int] | None]:
    """What each sign of a glob stands for: one of these bytes, or None for a star."""
    signs: list[frozenset[int] | None] = []
    every = frozenset(range(256))
    i = 0
    while i < len(pattern):
        sign, i = pattern[i], i + 1
        if sign == ord("\\") and i < len(pattern):
            signs.append(frozenset((pattern[i],)))
            i += 1
        elif sign == ord("["):
            some, i = _class(pattern, i)
            signs.append(some)
        else:
            signs.append(None if sign == ord("*") else every if sign == ord("?") else frozenset((sign,)))
    return signs


def _class(pattern: bytes, i: int) -> tuple[frozenset[int], int]:
    """The bytes of a class whose bracket stands before that place, and where it ends, at the latest with the glob."""
    some: set[int] = set()
    negated = pattern[i : i + 1] == b"^"
    i += negated
    while i < len(pattern) and pattern[i] != ord("]"):
        if pattern[i] == ord("\\") and i + 1 < len(pattern):
            some.add(pattern[i + 1])
            i += 2
        elif pattern[i + 1 : i + 2] == b"-" and i + 2 < len(pattern):
            low, high = sorted((pattern[i], pattern[i + 2]))
            some.update(range(low, high + 1))
            i += 3
        else:
            some.add(pattern[i])
            i += 1
    return frozenset(range(256)) - some if negated else frozenset(some), i + 1


def pending(keys: Keys, group: str, after: str, count: int) -> Flow[list[PendingEntry]]:
    """The next jobs that are being worked on; none where there is no such stream or group."""
    try:
        reply = yield command("XPENDING", keys.stream, group, behind(after), "+", count, safe=True)
    except Refusal as refusal:
        if refusal.code == "NOGROUP":
            return []
        raise
    return [PendingEntry(plain(one[0]), plain(one[1]), number(one[2]), number(one[3])) for one in reply]


def delayed(keys: Keys, least: str, skip: int, count: int, floor: int) -> Flow[tuple[list[tuple[bytes, float]], int]]:
    """Delayed members from a score on, the soonest first, and how many were asked for in the end: fewer where they are
    too long, but so many at least.
    """
    while True:
        args: tuple[Arg, ...] = ("ZRANGEBYSCORE", keys.delayed, least, "+inf", "WITHSCORES", "LIMIT", skip, count)
        flat = yield Command(args, safe=True, as_bytes=TOO_LONG if count > floor else sys.maxsize)
        if not isinstance(flat, TooLong):
            break
        count = max(floor, count // SHORTER)
    if isinstance(flat, bytes):
        flat = parsed(flat)
    return [(flat[i], float(flat[i + 1])) for i in range(0, len(flat), 2)], count


def results(keys: Sequence[str]) -> Flow[list[tuple[bytes, int]]]:
    """Stored results and how many milliseconds they have left; b"", -2 for what has expired meanwhile, or is none."""
    replies = yield Batch(tuple(Command((name, key), safe=True) for key in keys for name in ("GET", "PTTL")))
    for i in range(0, len(replies), 2):
        if isinstance(replies[i], Refusal) and replies[i].code == "WRONGTYPE":
            replies[i : i + 2] = [b"", -2]
    replies = values(replies)
    return [(replies[i] or b"", number(replies[i + 1])) for i in range(0, len(replies), 2)]


class PageLength:
    """How many entries to ask for: about ``PAGE_BYTES`` of such as those before. It grows by steps, so that one page of
    small entries does not make the next one, of large ones, a thousand times as long; and for a while not at all after
    a page that was too long, because what made it so is still to come.
    """

    def __init__(self) -> None:
        self.count = FIRST_PAGE
        self._steady = 0

    def had(self, asked: int, entries: int, size: int) -> None:
        """Take a page into account: how many it was asked for in the end, how many came, and their bytes."""
        if asked < self.count:
            self._steady = STEADY_PAGES
        most = asked if self._steady else 4 * asked
        self._steady = max(0, self._steady - 1)
        self.count = max(1, min(PAGE_ENTRIES, most, PAGE_BYTES * entries // max(1, size)))


def some_size(entries: Sequence[Any]) -> tuple[int, int]:
    """About how large entries are, told by some of them: how many were looked at, and their bytes."""
    some = entries[:: max(1, len(entries) // 64)]
    return len(some), sum(len(value) for entry in some for value in entry[1] or ())
