"""Ranges of streams: cut into partitions on the driver, read by tasks. What batch and stream readers share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from chasqui.bridge import Position, Reader, Sample, Walk
from chasqui_spark.collecting import freeze_once, paused
from chasqui_spark.offsets import lost_under, warning_of
from chasqui_spark.options import SourceOptions
from chasqui_spark.planning import (
    Range,
    RangePartition,
    cut,
    cuts_by_guessing,
    cuts_of_walk,
    packed,
    partitions_wanted,
    parts_of,
)
from chasqui_spark.rows import Rows
from chasqui_spark.source import reading
from chasqui_spark.worker_logs import show_logs

log = logging.getLogger("chasqui.spark")

_STEP = 1000

Walks = Mapping[tuple[str, str, str], Walk]
"""Ranges that were walked already: queue, after, upto."""


def cores() -> int:
    """Processors of this machine. In local mode these are Spark's; on a cluster ``minPartitions`` says how many."""
    return len(os.sched_getaffinity(0))


def walk_step(options: SourceOptions) -> int:
    """How many entries lie between two ids that a walk tells."""
    if options.jobs_per_partition is not None:
        return options.jobs_per_partition
    limit = options.max_jobs_per_trigger or _STEP * 64
    return max(1, min(_STEP, limit // (16 * (options.min_partitions or cores()))))


def planned(
    options: SourceOptions, reader: Reader, ranges: Sequence[Range], positions: Mapping[str, Position], walks: Walks
) -> list[RangePartition]:
    """The partitions of these ranges. The weight of a range is at most how many entries it holds."""
    limited = options.max_jobs_per_trigger is not None or options.max_bytes_per_trigger is not None
    counts = {r.queue: _at_most(r, positions[r.queue], walks.get((r.queue, r.after, r.upto))) for r in ranges}
    bins = partitions_wanted(sum(counts.values()), options.min_partitions, cores())
    parts = parts_of(counts, bins)
    pieces: list[Range] = []
    for r in ranges:
        key = (r.queue, r.after, r.upto)
        wanted, count = parts[r.queue], float(counts[r.queue])
        if options.jobs_per_partition is not None or (limited and wanted > 1):
            cuts, count = _walked(options, reader, r, wanted, walks.get(key))
        else:
            cuts = _guessed(options, reader, r, wanted)
        pieces += cut(r.queue, r.after, r.upto, cuts, count)
    if options.jobs_per_partition is not None:
        return [RangePartition([piece]) for piece in pieces]
    return packed(pieces, bins)


def _at_most(r: Range, position: Position, walk: Walk | None) -> int:
    return walk.entries if walk is not None else min(position.length, int(r.weight))


def _walked(options: SourceOptions, reader: Reader, r: Range, parts: int, walk: Walk | None) -> tuple[list[str], float]:
    step = walk_step(options)
    if walk is None:
        walk = reader.walk(options.view, r.queue, r.after, r.upto, step=step)
    if options.jobs_per_partition is None:
        return cuts_of_walk(walk.marks, step, walk.entries, parts), walk.entries
    least = options.min_partitions or 1
    if -(-walk.entries // step) < least:
        step = max(1, walk.entries // least)
        walk = reader.walk(options.view, r.queue, r.after, r.upto, step=step)
    return cuts_of_walk(walk.marks, step, walk.entries, None), walk.entries


def _guessed(options: SourceOptions, reader: Reader, r: Range, parts: int) -> list[str]:
    guessing = cuts_by_guessing(r.after, r.upto, parts)
    samples: list[Sample] | None = None
    while True:
        try:
            guesses = next(guessing) if samples is None else guessing.send(samples)
        except StopIteration as stop:
            cuts: list[str] = stop.value
            return cuts
        samples = reader.probe(options.view, r.queue, r.after, r.upto, guesses)


def read_ranges(options: SourceOptions, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
    """The rows of these ranges, a page at a time. Runs in a task: connects here, and goes on after a lost connection
    behind the last page.
    """
    rows = Rows(options)
    with paused(), reading(options) as reader:
        for r in ranges:
            for page in (
                reader.job_pages(r.queue, r.after, r.upto)
                if options.view == "jobs"
                else reader.pages(options.view, r.queue, r.after, r.upto, before=_watch(options, reader, r))
            ):
                yield rows.batch(r.queue, page)
    freeze_once()


def _watch(options: SourceOptions, reader: Reader, r: Range) -> Callable[[str, int], None] | None:
    """Looks, before each page, whether entries that are still to be read were trimmed since the batch was planned."""
    if r.batch is None:
        return None
    show_logs()
    batch, told = r.batch, False

    def look(at: str, read: int) -> None:
        nonlocal told
        position = reader.positions(options.view, [r.queue])[r.queue]
        lost = None if told else lost_under(batch, r.added, at, read, position)
        if lost is not None:
            told = True
            log.warning("%s", warning_of(options, r.queue, lost))

    return look
