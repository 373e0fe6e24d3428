"""Where a stream query stands: offsets as JSON, where to begin, and whether entries were lost. Pure.

An offset is canonical: keys sorted, nothing in it that changes by itself, because Spark compares the text, and a
difference runs a batch. Two forms, both version 1:

    {"start": "earliest", "v": 1}                                       before anything was read: as asked for
    {"queues": {"mail": {"added": 12, "id": "1-0"}}, "v": 1}            read up to and including these entries

``added`` is how many entries the stream had ever had when the one of ``id`` was its last, where that is known; it tells
lost entries from none. ``ahead`` is true where the stream has not come to ``id`` yet: a start in the future. ``view``
stands beside ``v`` where it is not ``jobs``.

Two more stand in an end offset about its batch alone. ``from``: it begins elsewhere than the offset before says, as the
first one after a symbolic start and the one after data loss do. ``gone``: so many of those ``added`` were not there any
more when a first batch was planned, and when it is run again there should be no more of them.

Spark asks for the initial offset twice, and again after a crash; a symbolic one is the same each time, and what it
meant is then read from the logged end offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from chasqui import ChasquiError, DataLoss, OptionError, WrongKeyType
from chasqui.bridge import Position, id_parts, id_text, matches, predecessor
from chasqui_spark.options import SourceOptions

VERSION = 1
BEGINNING = "0-0"
JOBS = "jobs"
EARLIEST, LATEST = "earliest", "latest"

_ID = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?", re.ASCII)
_U64 = 2**64 - 1
# Epoch seconds of any time up to the year 5138 are less, and milliseconds of any since March 1973 are not.
_FIRST_MS = 10**11


@dataclass(frozen=True, slots=True)
class Start:
    """Where to begin: ``earliest``, ``latest`` or the id behind which to read, for all queues and for single ones.

    ``entries``: the queues where that is an entry, which was there when somebody wrote it down, and not a time.
    """

    everywhere: str = EARLIEST
    queues: Mapping[str, str] = field(default_factory=dict)
    entries: frozenset[str] = frozenset()

    def of(self, queue: str) -> str:
        return self.queues.get(queue, self.everywhere)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one queue is read. ``begin`` is what the JSON calls ``from``."""

    id: str
    added: int | None = None
    begin: str | None = None
    ahead: bool = False
    gone: int | None = None

    @property
    def settled(self) -> Mark:
        """The same without what was about the batch that it ended."""
        return self if self.begin is None and self.gone is None else replace(self, begin=None, gone=None)


@dataclass(frozen=True, slots=True)
class Offset:
    """A parsed offset; ``symbolic`` before the first batch."""

    marks: Mapping[str, Mark]
    symbolic: bool = False


# --- JSON ---


def initial(start: Start) -> dict[str, Any]:
    """The offset before the first batch: constant, whatever stands in the queues."""
    if not start.queues:
        return {"start": start.everywhere, "v": VERSION}
    return {"start": {queue: start.queues[queue] for queue in sorted(start.queues)}, "v": VERSION}


def to_json(marks: Mapping[str, Mark], view: str) -> dict[str, Any]:
    about = {"v": VERSION} if view == JOBS else {"v": VERSION, "view": view}
    return {"queues": {queue: _mark_json(marks[queue]) for queue in sorted(marks)}, **about}


def _mark_json(mark: Mark) -> dict[str, Any]:
    known = {"added": mark.added, "ahead": mark.ahead or None, "from": mark.begin, "gone": mark.gone, "id": mark.id}
    return {name: value for name, value in known.items() if value is not None}


def from_json(given: Any, view: str) -> Offset:
    """Read an offset of a checkpoint, which may be older than this program, damaged, or another source's."""
    if not isinstance(given, dict) or "v" not in given:
        raise _foreign("no version is in it")
    if given["v"] != VERSION:
        raise _foreign(f"its version is {given['v']!r:.20}, this program reads {VERSION}")
    if "start" in given:
        return Offset({}, symbolic=True)
    queues = given.get("queues")
    if not isinstance(queues, dict):
        raise _foreign("no queues are in it; it may be one of mode=consume")
    if given.get("view", JOBS) != view:
        raise _foreign(f"it is of view {given.get('view', JOBS)!r:.20}, and this query reads {view}")
    return Offset({str(queue): _mark(one) for queue, one in queues.items()})


def _mark(given: Any) -> Mark:
    if isinstance(given, dict):
        at, begin, ahead = given.get("id"), given.get("from"), given.get("ahead", False)
        counts = [given.get("added"), given.get("gone")]
        if (
            isinstance(at, str)
            and _is_id(at)
            and (begin is None or _is_id(begin))
            and isinstance(ahead, bool)
            and all(n is None or (type(n) is int and 0 <= n <= _U64) for n in counts)
        ):
            return Mark(at, counts[0], begin, ahead, counts[1])
    raise _foreign("a queue's entry in it cannot be read")


def _foreign(why: str) -> ChasquiError:
    return ChasquiError(
        f"the checkpoint holds an offset that is not of this source: {why}. Use the program that wrote it, or another "
        f"checkpointLocation"
    )


# --- Where to begin and to end, as users write it ---


def start_of(options: SourceOptions) -> Start:
    """What ``startingOffsets`` or ``startingTimestamp`` mean. The entry they name is the first one read."""
    if options.starting_timestamp is not None:
        ms = _timestamp("startingTimestamp", options.starting_timestamp)
        return Start(_behind((ms, 0)))
    given = options.starting_offsets
    if given is None or given.strip().lower() in (EARLIEST, LATEST):
        return Start((given or EARLIEST).strip().lower())
    found = _by_queue("startingOffsets", given, (EARLIEST, LATEST))
    behind = {q: v if v in (EARLIEST, LATEST) else _behind(id_parts(v)) for q, v in found.items()}
    return Start(EARLIEST, behind, frozenset(q for q, v in found.items() if "-" in v))


def end_of(options: SourceOptions) -> Start:
    """The same for ``endingOffsets``, whose entry is the last one read, and ``endingTimestamp``, which is excluded."""
    if options.ending_timestamp is not None:
        return Start(_behind((_timestamp("endingTimestamp", options.ending_timestamp), 0)))
    given = options.ending_offsets
    if given is None or given.strip().lower() == LATEST:
        return Start(LATEST)
    return Start(LATEST, {q: _whole(v) for q, v in _by_queue("endingOffsets", given, (LATEST,)).items()})


def check_start(options: SourceOptions) -> None:
    """Refuse what cannot be read, or names queues that this query does not."""
    for name, found in (("startingOffsets", start_of(options)), ("endingOffsets", end_of(options))):
        pattern, named = options.queue_pattern, {options.queue}
        if options.queues is not None:
            named = {q.strip() for q in options.queues.split(",")}
        for queue in found.queues:
            if queue not in named if pattern is None else not matches(pattern, queue):
                what = (
                    "none of the queues that are read" if pattern is None else f"no queue of queuePattern {pattern!r}"
                )
                raise OptionError(f"{name} names {queue!r:.80}, which is {what}")


def _by_queue(option: str, given: str, words: tuple[str, ...]) -> dict[str, str]:
    expected = f'{option} expects {", ".join(words)}, or JSON such as {{"mail": "1794978620538-0"}}'

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [queue for queue, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(queue for i, queue in enumerate(names) if queue in names[:i])
            raise OptionError(f"{option} names queue {twice!r:.80} twice: give each queue one place")
        return dict(pairs)

    try:
        found = json.loads(given, object_pairs_hook=once)
    except OptionError:
        raise
    except (ValueError, RecursionError):
        raise OptionError(f"{expected}; got {given!r:.80}") from None
    if not isinstance(found, dict) or not found:
        raise OptionError(f"{expected}; got {given!r:.80}")
    for queue, one in found.items():
        if not isinstance(one, str) or (one not in words and not _is_id(one)):
            raise OptionError(f"{expected}; for {queue!r:.80} came {one!r:.80}")
    return found


def _is_id(text: Any) -> bool:
    match = _ID.fullmatch(text) if isinstance(text, str) else None
    return match is not None and int(match[1]) <= _U64 and int(match[2] or 0) <= _U64


def _whole(given: str) -> str:
    """An id without sequence number, as an end, means all of its millisecond."""
    return given if given == LATEST or "-" in given else f"{given}-{_U64}"


def _behind(first: tuple[int, int]) -> str:
    return id_text(predecessor(first))


def _timestamp(option: str, given: str) -> int:
    """Epoch milliseconds of a time that a user wrote; one without a zone is UTC."""
    text = given.strip()
    if re.fullmatch(r"\d{1,15}", text, re.ASCII):
        if 0 < int(text) < _FIRST_MS:
            raise OptionError(
                f"{option} expects epoch milliseconds; {text} looks like seconds: for those write {text}000, and for a "
                f"time before March 1973 ISO text"
            )
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        ms = (aware - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000
        if ms < 0:
            raise ValueError
    except (ValueError, OverflowError):
        raise OptionError(
            f"{option} expects ISO text such as 2026-11-18T10:00:00Z, or epoch milliseconds; got {given!r:.80}"
        ) from None
    return round(ms)


def resolved(wanted: str, position: Position) -> str:
    """The id behind which to read."""
    if wanted == EARLIEST:
        return BEGINNING
    return position.last_id if wanted == LATEST else wanted


def moved(old: Mark | None, new: Mark) -> bool:
    """Whether a queue goes further, or goes on elsewhere; only then is there a batch to run."""
    return new.begin is not None or new.id != (BEGINNING if old is None else old.id)


# --- Data loss ---


def warning_of(options: SourceOptions, queue: str, lost: str) -> str:
    """What to say about a loss that was accepted; else ``DataLoss``."""
    text = f"queue {queue!r}, view {options.view}: {lost}"
    if options.fail_on_data_loss:
        raise DataLoss(
            f"{text}. Entries may be lost to this query. failOnDataLoss=false goes on with what is there; a new "
            f"checkpointLocation starts over"
        )
    return f"{text}; going on, because failOnDataLoss=false"


@dataclass(frozen=True, slots=True)
class Found:
    """How a queue goes on: behind which id, and what was lost, for people. ``here`` is false where nothing can be read
    now. ``gone`` counts entries that were taken away before we came, at least.
    """

    begin: str
    lost: str | None = None
    here: bool = True
    gone: int = 0


def first_look(start: Start, queue: str, position: Position) -> Found:
    """Where a queue begins that was not read before. An entry that a start names, and the stream has not come to, was
    lost; a time may lie in the future.
    """
    begin = resolved(start.of(queue), position)
    if queue in start.entries and id_parts(begin) > id_parts(position.last_id):
        lost = f"startingOffsets begins behind {begin}, and the stream ends before, at {position.last_id}"
        return Found(position.last_id, lost, here=position.exists)
    return Found(begin, here=position.exists)


def assess(view: str, mark: Mark, position: Position | WrongKeyType, *, may_vanish: bool) -> Found:
    """Compare how far we are with where the stream stands.

    In ``jobs`` entries disappear because workers settle them, which cannot be told from trimming: they are counted,
    and no loss. ``may_vanish``: the queues of a pattern come and go. A stream that was seen to be gone is a new one
    when it is back. Else reading goes on behind the mark, also where entries were lost: what stands up to there was
    read, and ids follow the server's clock, so that those of a stream that was made anew are higher.
    """
    if isinstance(position, WrongKeyType):
        return Found(mark.id, "its key holds another type", here=False)
    begun = mark.id != BEGINNING and not mark.ahead
    if not position.exists:
        lost = "its stream is gone" if begun and not may_vanish else None
        return Found(BEGINNING if begun else mark.id, lost, here=False)
    at, last = id_parts(mark.id), id_parts(position.last_id)
    if last < at and not mark.ahead:
        # Ids up to the new end were read already, whether the server lost its tail or an old copy was restored.
        return Found(position.last_id, f"it ends at {position.last_id}, before {mark.id}, which was read already")
    if mark.ahead or mark.added is None or position.added is None:
        return Found(mark.id)
    grown = position.added - mark.added
    all_new = position.first_id is not None and id_parts(position.first_id) > at
    if grown < 0 or (grown == 0 and last != at) or (all_new and position.length > grown):
        counted = (
            f"{position.added} entries were ever added, {position.length} are there, {mark.added} were read before"
        )
        return Found(mark.id, f"it was made anew, or lost entries: {counted}")
    missing = grown - position.length
    if missing <= 0:
        return Found(mark.id)
    if view == "jobs":
        return Found(mark.id, gone=missing)
    if position.max_deleted is not None and id_parts(position.max_deleted) <= at:
        return Found(mark.id, f"{missing} entries after {mark.id} were trimmed before they were read")
    return Found(mark.id)


def lost_since(
    view: str, old: Mark | None, mark: Mark, position: Position | WrongKeyType, *, may_vanish: bool
) -> str | None:
    """What a batch from one mark to the other has lost since it was planned; it may be run again much later."""
    lost = assess(view, mark, position, may_vanish=may_vanish).lost
    if lost is not None:
        return lost
    if mark.gone is not None and isinstance(position, Position) and position.added is not None:
        trimmed = position.added - position.length - mark.gone
        deleted = position.max_deleted is None or id_parts(position.max_deleted) > id_parts(mark.begin or BEGINNING)
        if trimmed > 0 and not deleted:
            return f"{trimmed} entries up to {mark.id} were trimmed before they were read"
    if old is None or mark.begin is not None:
        return None
    return assess(view, old, position, may_vanish=may_vanish).lost


def gone_before(view: str, begin: str, position: Position) -> int | None:
    """How many entries were gone when a first batch was planned, where all that are there come after its begin and none
    was deleted; else None, as for jobs, which workers settle.
    """
    if view == "jobs" or position.first_id is None or position.added is None or position.max_deleted is None:
        return None
    if id_parts(begin) >= id_parts(position.first_id) or id_parts(position.max_deleted) > id_parts(begin):
        return None
    return position.added - position.length


def lost_under(batch: str, added: int | None, at: str, read: int, position: Position | WrongKeyType) -> str | None:
    """What trimming took from a range while it was read, as far as ``at``: so many entries of a range that begins where
    ``added`` entries had ever been. Where that is not known something is behind ``at`` no more when nothing up to there
    is left. Deleted entries make it undecidable, and a stream that is gone is told by the next look.
    """
    if not isinstance(position, Position) or not position.exists or position.added is None:
        return None
    if position.max_deleted is None or id_parts(position.max_deleted) > id_parts(batch):
        return None
    if added is not None:
        missing = position.added - position.length - added - read
        return f"{missing} entries after {at} were trimmed while the batch was read" if missing > 0 else None
    if position.first_id is None or id_parts(position.first_id) > id_parts(at):
        return f"entries after {at} were trimmed while the batch was read"
    return None


def added_at(begin: str, mark: Mark | None, position: Position, walked: int) -> int | None:
    """How many entries the stream had ever had when the last one walked was added; None where that is not certain.

    Certain only while no entry behind ``begin`` was deleted by XDEL: then every one that was added has been walked.
    """
    if position.added is None or position.max_deleted is None or id_parts(position.max_deleted) > id_parts(begin):
        return None
    if position.first_id is None or id_parts(begin) < id_parts(position.first_id):
        return position.added - position.length + walked
    return mark.added + walked if mark is not None and mark.added is not None and mark.id == begin else None
