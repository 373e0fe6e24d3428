"""Where a stream query stands: offsets as JSON, where to begin, and whether entries were lost. Pure.

An offset is canonical: keys sorted, nothing in it that changes by itself, because Spark compares the text, and a
difference runs a batch. Two forms, both version 1:

    {"start": "earliest", "v": 1}                                       before anything was read: as asked for
    {"queues": {"mail": {"added": 12, "id": "1-0"}}, "v": 1}            read up to and including these entries

``added`` is how many entries the stream had ever had when the one of ``id`` was its last, where that is known; it tells
lost entries from none. ``from`` stands in an end offset where its batch begins elsewhere than the offset before says:
the first one after a symbolic start, and after data loss. Spark asks for the initial offset twice, and again after a
crash; a symbolic one is the same each time, and what it meant is then read from the logged end offset.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from chasqui import ChasquiError, OptionError, WrongKeyType
from chasqui.bridge import Position, id_parts, id_text, predecessor
from chasqui_spark.options import SourceOptions

VERSION = 1
BEGINNING = "0-0"
EARLIEST, LATEST = "earliest", "latest"

_ID = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?", re.ASCII)
_U64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Start:
    """Where to begin: ``earliest``, ``latest`` or the id behind which to read, for all queues and for single ones."""

    everywhere: str = EARLIEST
    queues: Mapping[str, str] = field(default_factory=dict)

    def of(self, queue: str) -> str:
        return self.queues.get(queue, self.everywhere)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one queue is read. ``begin`` is what the JSON calls ``from``."""

    id: str
    added: int | None = None
    begin: str | None = None


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


def to_json(marks: Mapping[str, Mark]) -> dict[str, Any]:
    return {"queues": {queue: _mark_json(marks[queue]) for queue in sorted(marks)}, "v": VERSION}


def _mark_json(mark: Mark) -> dict[str, Any]:
    known = {"added": mark.added, "from": mark.begin, "id": mark.id}
    return {name: value for name, value in known.items() if value is not None}


def from_json(given: Any) -> Offset:
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
    return Offset({str(queue): _mark(one) for queue, one in queues.items()})


def _mark(given: Any) -> Mark:
    try:
        added, begin = given.get("added"), given.get("from")
        for one in (given["id"], begin or BEGINNING):
            if not _ID.fullmatch(one):
                raise ValueError(one)
        return Mark(given["id"], None if added is None else int(added), begin)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _foreign("a queue's entry in it cannot be read") from None


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
    return Start(EARLIEST, {q: v if v in (EARLIEST, LATEST) else _behind(id_parts(v)) for q, v in found.items()})


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
        if options.queue_pattern is not None:
            continue
        named = {q.strip() for q in (options.queue or options.queues or "").split(",")}
        if options.queue is not None:
            named = {options.queue}
        strangers = sorted(set(found.queues) - named)
        if strangers:
            raise OptionError(f"{name} names {strangers[0]!r:.80}, which is none of the queues that are read")


def _by_queue(option: str, given: str, words: tuple[str, ...]) -> dict[str, str]:
    expected = f'{option} expects {", ".join(words)}, or JSON such as {{"mail": "1794978620538-0"}}'
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        raise OptionError(f"{expected}; got {given!r:.80}") from None
    if not isinstance(found, dict) or not found:
        raise OptionError(f"{expected}; got {given!r:.80}")
    for queue, one in found.items():
        if not isinstance(one, str) or (one not in words and not _is_id(one)):
            raise OptionError(f"{expected}; for {queue!r:.80} came {one!r:.80}")
    return found


def _is_id(text: str) -> bool:
    match = _ID.fullmatch(text)
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


@dataclass(frozen=True, slots=True)
class Found:
    """How a queue goes on: behind which id, and what was lost, for people. ``here`` is false where nothing can be read
    now: the offset stays. ``gone`` counts entries that were taken away before we came, at least.
    """

    begin: str
    lost: str | None = None
    here: bool = True
    gone: int = 0


def assess(view: str, mark: Mark, position: Position | WrongKeyType, *, may_vanish: bool) -> Found:
    """Compare how far we are with where the stream stands.

    In ``jobs`` entries disappear because workers settle them, which cannot be told from trimming: they are counted,
    and no loss. ``may_vanish``: the queues of a pattern come and go.
    """
    begun = mark.id != BEGINNING
    if isinstance(position, WrongKeyType):
        return Found(mark.id, "its key holds another type", here=False)
    if not position.exists:
        return Found(mark.id, "its stream is gone" if begun and not may_vanish else None, here=False)
    if id_parts(position.last_id) < id_parts(mark.id):
        # Ids up to the new end were read already, whether the server lost its tail or an old copy was restored.
        return Found(position.last_id, f"it ends at {position.last_id}, before {mark.id}, which was read already")
    if mark.added is None or position.added is None:
        return Found(mark.id)
    grown = position.added - mark.added
    if grown < 0 or (grown == 0 and position.last_id != mark.id):
        return Found(BEGINNING, f"it was made anew: {position.added} entries were ever added, {mark.added} before")
    missing = grown - position.length
    if missing <= 0:
        return Found(mark.id)
    if view == "jobs":
        return Found(mark.id, gone=missing)
    if position.max_deleted is not None and id_parts(position.max_deleted) <= id_parts(mark.id):
        return Found(mark.id, f"{missing} entries after {mark.id} were trimmed before they were read")
    return Found(mark.id)


def added_at(begin: str, mark: Mark | None, position: Position, walked: int) -> int | None:
    """How many entries the stream had ever had when the last one walked was added; None where that is not certain.

    Certain only while no entry behind ``begin`` was deleted by XDEL: then every one that was added has been walked.
    """
    if position.added is None or position.max_deleted is None or id_parts(position.max_deleted) > id_parts(begin):
        return None
    if position.first_id is None or id_parts(begin) < id_parts(position.first_id):
        return position.added - position.length + walked
    return mark.added + walked if mark is not None and mark.added is not None and mark.id == begin else None
