"""``spark.readStream.format("chasqui")``: a queue as it grows, with no side effect on it.

Spark polls ``latestOffset`` every ten milliseconds while a query is idle: then it costs one pipelined command a queue,
to which the answer is nothing. Where streams stand is asked when something new is there, and once a second: that answer
holds two whole entries of each. The process that holds this object lives as long as the query's run; everything that
must survive it is in the offsets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from chasqui import ChasquiError, WrongKeyType
from chasqui.bridge import Position, Reader, Walk, id_parts, matches
from chasqui_spark.offsets import (
    BEGINNING,
    LATEST,
    Found,
    Mark,
    Offset,
    Start,
    added_at,
    assess,
    check_start,
    first_look,
    from_json,
    gone_before,
    initial,
    lost_since,
    moved,
    start_of,
    to_json,
    warning_of,
)
from chasqui_spark.options import SourceOptions
from chasqui_spark.planning import Range, RangePartition, fair_order, share
from chasqui_spark.ranges import planned, read_ranges, walk_step
from chasqui_spark.source import close_all, found_queues, named_queues, reading
from chasqui_spark.views import check_schema
from chasqui_spark.worker_logs import show_logs

log = logging.getLogger("chasqui.spark")

LOOK_EVERY_S = 1.0
FIGURES_EVERY_S = 1.0
FIGURES_AGAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class _Idle:
    """A look that found nothing new: until when that is good, at which offset, and behind which ids of which queues."""

    until: float
    at: dict[str, Any]
    behind: dict[str, str]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads ``jobs``, ``events`` or ``dlq`` from outside. Made in several processes, so making it does nothing."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(options, schema)
        check_start(options)
        named_queues(options)
        self._options = options
        self._start = start_of(options)
        self._queues: list[str] = []
        self._looked_at: float | None = None
        self._targets: dict[str, Position] | None = None
        self._walks: dict[tuple[str, str, str], Walk] = {}
        self._turn = 0
        self._starved = False
        self._gone = 0
        self._warned: set[tuple[str, str]] = set()
        self._idle: _Idle | None = None
        self._figures: tuple[float, dict[str, Any] | None] | None = None

    # --- Offsets ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Symbolic and constant: Spark asks twice, and once more after a crash in the first batch."""
        return initial(self._start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark knows one limit at a time; where both are set the bytes are added in ``latestOffset``."""
        if self._options.max_jobs_per_trigger is not None:
            return ReadMaxRows(self._options.max_jobs_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note where all streams end now; entries and queues that come later are for the next run."""
        with reading(self._options) as reader:
            queues = found_queues(self._options, reader)
            positions = reader.positions(self._options.view, queues)
            self._queues, self._looked_at = queues, time.monotonic()
            # One that is no stream stays among them, so that the first look at it says so.
            self._targets = {q: p if isinstance(p, Position) else Position() for q, p in positions.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes; exactly ``start`` where nothing is new."""
        show_logs()
        idle, self._idle = self._idle, None
        with reading(self._options) as reader:
            fresh = idle is not None and idle.at == start and time.monotonic() < idle.until
            if idle is not None and fresh and not reader.grown(self._options.view, idle.behind):
                self._idle = idle
                return start
            before = from_json(start, self._options.view)
            queues = self._wanted(reader, before)
            positions = reader.positions(self._options.view, queues)
            found = {queue: self._found(queue, before, positions[queue]) for queue in queues}
            ends = self._ends(reader, before, positions, found, limit)
        # What "latest" means is settled now and written down, or later polls would skip what came in between.
        settled = before.symbolic and LATEST in (self._start.everywhere, *self._start.queues.values())
        changed = settled
        marks: dict[str, Mark] = {}
        for queue in sorted({*before.marks, *ends}):
            old = before.marks.get(queue)
            new = ends.get(queue, old)
            if new is None:
                changed = True  # forgotten
            elif new is not old and moved(old, new):
                marks[queue] = new
                changed = True
            elif old is not None:
                marks[queue] = old.settled
            elif settled:
                marks[queue] = Mark(BEGINNING)
        if changed:
            return to_json(marks, self._options.view)
        wait = LOOK_EVERY_S if self._options.queue_pattern is None else self._options.discovery_interval / 1000
        behind = {queue: one.begin for queue, one in found.items()}
        self._idle = _Idle(time.monotonic() + min(wait, LOOK_EVERY_S), start, behind)
        return start

    def _wanted(self, reader: Reader, before: Offset) -> list[str]:
        """The queues to look at: those that are named, or those found of the pattern and those of it read before."""
        pattern = self._options.queue_pattern
        known = [queue for queue in before.marks if pattern is not None and matches(pattern, queue)]
        if self._targets is not None:
            return sorted({*self._targets, *known})
        now = time.monotonic()
        due = self._looked_at is None or (now - self._looked_at) * 1000 >= self._options.discovery_interval
        if due and (pattern is not None or not self._queues):
            self._queues, self._looked_at = found_queues(self._options, reader), now
        return sorted({*self._queues, *known})

    def _found(self, queue: str, before: Offset, position: Position | WrongKeyType) -> Found:
        mark = before.marks.get(queue)
        if mark is None:
            if isinstance(position, WrongKeyType):
                raise position
            # A queue that appears while the query runs starts at its first entry, unless its start was given by name.
            start = self._start if before.symbolic or queue in self._start.queues else Start()
            found = first_look(start, queue, position)
        else:
            found = assess(self._options.view, mark, position, may_vanish=self._may_vanish)
        if found.lost is not None:
            self._tell_loss(queue, found.lost)
        if isinstance(position, Position) and position.exists and position.added is None:
            self._warn_once(
                queue,
                "counters",
                "the server does not count entries (Redis before 7.0): of lost ones only the ids tell",
            )
        self._gone += found.gone
        return found

    @property
    def _may_vanish(self) -> bool:
        return self._options.queue_pattern is not None

    def _tell_loss(self, queue: str, lost: str) -> None:
        self._warn_once(queue, lost, warning_of(self._options, queue, lost))

    def _warn_once(self, queue: str, what: str, text: str) -> None:
        if (queue, what) not in self._warned:
            if len(self._warned) > 10_000:
                self._warned.clear()
            self._warned.add((queue, what))
            log.warning("%s", text)

    def _ends(
        self,
        reader: Reader,
        before: Offset,
        positions: dict[str, Position | WrongKeyType],
        found: dict[str, Found],
        limit: ReadLimit,
    ) -> dict[str, Mark | None]:
        """The new mark of each queue that has one, None of one that starts over when it is there again. Without a limit
        the mark is the stream's end, and nothing is asked.
        """
        ends: dict[str, Mark | None] = {}
        waiting: dict[str, Position] = {}
        for queue, one in found.items():
            position = positions[queue]
            if not isinstance(position, Position):
                continue
            if not position.exists:
                old = before.marks.get(queue)
                over = old is not None and old.id != one.begin and self._may_vanish and queue not in self._start.queues
                ends[queue] = None if over else self._mark(before, queue, one, one.begin, position)
                continue
            target = self._target(queue, position)
            if id_parts(one.begin) >= id_parts(target):
                # Nothing to read, but a begin that differs from the offset before has to be remembered.
                ends[queue] = self._mark(before, queue, one, one.begin, position)
            else:
                ends[queue] = self._mark(before, queue, one, target, position)
                waiting[queue] = position
        entries, size = self._limits(limit)
        if entries is not None or size is not None:
            self._walks.clear()
            scarce = self._starved or (entries is not None and entries < len(waiting))
            order = fair_order({q: p.length for q, p in waiting.items()}, self._turn if scarce else 0)
            self._turn += 1
            self._starved = False
            for left, queue in zip(range(len(order), 0, -1), order, strict=True):
                most = None if entries is None else share(entries, left)
                room = None if size is None else share(size, left)
                walk = self._walked(reader, before, queue, found[queue], waiting[queue], ends, most, room)
                self._starved |= room == 0
                entries = None if entries is None else max(0, entries - walk.entries)
                size = None if size is None else max(0, size - walk.size)
        return ends

    def _walked(
        self,
        reader: Reader,
        before: Offset,
        queue: str,
        one: Found,
        position: Position,
        ends: dict[str, Mark | None],
        most: int | None,
        room: int | None,
    ) -> Walk:
        """Cut a queue's batch down to its share; what it leaves is for the queues after it."""
        end = self._target(queue, position)
        if most == 0 or room == 0:
            ends[queue] = self._mark(before, queue, one, one.begin, position)
            return Walk(0, 0, None, ())
        view = self._options.view
        walk = reader.walk(view, queue, one.begin, end, entries=most, size=room, step=walk_step(self._options))
        full = (most is not None and walk.entries >= most) or (room is not None and walk.size >= room)
        if full and walk.last_id is not None and walk.last_id != end:
            end = walk.last_id
            added = added_at(one.begin, before.marks.get(queue), position, walk.entries)
            if added is not None and view != "jobs":
                # Dead letters that were replayed or purged meanwhile were not walked: later they would seem to be lost.
                now = reader.positions(view, [queue])[queue]
                if not isinstance(now, Position) or now.max_deleted != position.max_deleted:
                    added = None
            ends[queue] = replace(self._mark(before, queue, one, end, position), added=added)
        self._walks[queue, one.begin, end] = walk
        return walk

    def _target(self, queue: str, position: Position) -> str:
        target = position if self._targets is None else self._targets.get(queue, Position())
        return min(target.last_id, position.last_id, key=id_parts)

    def _mark(self, before: Offset, queue: str, one: Found, end: str, position: Position) -> Mark:
        old = before.marks.get(queue)
        expected = old.id if old is not None else BEGINNING
        # More may have come since AvailableNow began: how many there were at its target was counted then.
        seen = (position, *([self._targets[queue]] if self._targets and queue in self._targets else ()))
        return Mark(
            end,
            next((one.added for one in seen if end == one.last_id), None),
            one.begin if one.begin != expected else None,
            ahead=id_parts(end) > id_parts(position.last_id),
            gone=gone_before(self._options.view, one.begin, position) if old is None or one.begin != expected else None,
        )

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """Entries and bytes. ``ReadAllAvailable`` where limits are set comes from a trigger that wants everything."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        entries = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes_per_trigger
        return entries, size

    # --- Batches ---

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch. After a crash Spark asks for a logged batch again: the offsets alone decide."""
        show_logs()
        before, after = (from_json(one, self._options.view) for one in (start, end))
        wanted: list[tuple[str, str, Mark]] = []
        for queue, mark in after.marks.items():
            old = before.marks.get(queue)
            begin = mark.begin if mark.begin is not None else old.id if old is not None else BEGINNING
            if id_parts(begin) < id_parts(mark.id):
                wanted.append((queue, begin, mark))
        if not wanted:
            return [RangePartition([])]
        with reading(self._options) as reader:
            found = reader.positions(self._options.view, [queue for queue, _, _ in wanted])
            for queue, _, mark in wanted:
                old = before.marks.get(queue)
                lost = lost_since(self._options.view, old, mark, found[queue], may_vanish=self._may_vanish)
                if lost is not None:
                    self._tell_loss(queue, lost)
            positions = {queue: one for queue, one in found.items() if isinstance(one, Position)}
            ranges = [
                Range(queue, begin, mark.id, _at_most(before.marks.get(queue), mark, positions[queue]))
                for queue, begin, mark in wanted
                if queue in positions
            ]
            parts = list(planned(self._options, reader, ranges, positions, self._walks)) or [RangePartition([])]
        return parts if self._options.view == "jobs" else [self._watched(part, before, after) for part in parts]

    def _watched(self, part: RangePartition, before: Offset, after: Offset) -> RangePartition:
        """The same with what a task needs to know to see that entries are trimmed before it comes to them."""
        ranges: list[Range] = []
        for r in part.ranges:
            old, mark = before.marks.get(r.queue, Mark(BEGINNING)), after.marks[r.queue]
            batch, added = (old.id, old.added if mark.gone is None else mark.gone)
            if mark.begin is not None:
                batch, added = mark.begin, mark.gone
            if r.after != batch:
                r = replace(r, batch=batch)
            elif added is not None:
                r = replace(r, batch=batch, added=added)
            ranges.append(r)
        return RangePartition(ranges)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """A generator of record batches; runs in a task."""
        return read_ranges(self._options, partition.ranges if isinstance(partition, RangePartition) else ())

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: reading from outside leaves no trace."""

    def stop(self) -> None:
        close_all()

    # --- What the progress shows ---

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Figures of the queues for StreamingQueryProgress, at most a second old. They are for people: where they
        cannot be had, the query goes on without.
        """
        now = time.monotonic()
        if self._figures is not None and now < self._figures[0]:
            return self._figures[1]
        with reading(self._options) as reader:
            try:
                stats = reader.stats(self._queues, self._options.group)
            except ChasquiError as error:
                self._warn_once("", "figures", f"no figures for the progress: {error}")
                self._figures = (now + FIGURES_AGAIN_S, None)
                return None
        queues = {
            queue: {
                "delayed": one.delayed,
                "depth": one.waiting + one.pending,
                "dlq": one.dlq,
                "oldest_age_ms": one.oldest_age_ms,
                "paused": one.paused,
                "pending": one.pending,
                "waiting": one.waiting,
            }
            for queue, one in sorted(stats.items())
        }
        self._figures = (now + FIGURES_EVERY_S, {"gone": self._gone, "queues": queues, "v": 1})
        return self._figures[1]


def _at_most(old: Mark | None, mark: Mark, position: Position) -> int:
    """How many entries lie between two marks: a weight for planning, not a reason to leave anything out."""
    if old is None or old.added is None or mark.added is None or mark.begin is not None:
        return position.length
    return min(position.length, max(1, mark.added - old.added))
