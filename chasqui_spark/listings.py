"""Views that are lists and not streams: pending, delayed, repeatable, results, stats. Batch only, queue by queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from chasqui.bridge import JobColumns, Reader, delayed_columns
from chasqui_spark.options import SourceOptions
from chasqui_spark.rows import Rows, id_times, retries, times


def listed(options: SourceOptions, rows: Rows, reader: Reader, queue: str) -> Iterator[pa.RecordBatch]:
    """The rows of one queue, in batches."""
    if options.view == "pending":
        yield from _pending(rows, reader, queue, options.group)
    elif options.view == "delayed":
        yield from _delayed(rows, reader, queue)
    elif options.view == "repeatable":
        yield from _repeatable(rows, reader, queue)
    elif options.view == "results":
        yield from _results(rows, reader, queue)
    else:
        yield _stats(rows, reader, queue, options.group)


def _table(rows: Rows, queue: str, count: int, columns: dict[str, Any]) -> pa.RecordBatch:
    columns["queue"] = pa.repeat(pa.scalar(queue, pa.string()), count)
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for field, column in ((field, columns[field.name]) for field in rows.schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def _pending(rows: Rows, reader: Reader, queue: str, group: str) -> Iterator[pa.RecordBatch]:
    for page in reader.pending(queue, group):
        ids = pa.array([one.entry_id for one in page], pa.string())
        yield _table(
            rows,
            queue,
            len(page),
            {
                "entry_id": ids,
                "enqueued_at": id_times(ids),
                "consumer": [one.consumer for one in page],
                "idle_ms": [one.idle_ms for one in page],
                "deliveries": [one.deliveries for one in page],
            },
        )


def _delayed(rows: Rows, reader: Reader, queue: str) -> Iterator[pa.RecordBatch]:
    for page in reader.delayed(queue):
        columns = rows.job_arrays(delayed_columns([member for member, _ in page]))
        columns["queue"] = pa.repeat(pa.scalar(queue, pa.string()), len(page))
        columns["run_at"] = times([_ms(score) for _, score in page])
        where = [f"a delayed job of queue {queue!r}, due at {score:.0f}" for _, score in page]
        yield rows.finished(columns, where, None)


def _ms(score: float) -> int | None:
    """Scores are written as whole milliseconds; a foreign one may be infinite."""
    return int(score) if abs(score) < 2**63 else None


def _repeatable(rows: Rows, reader: Reader, queue: str) -> Iterator[pa.RecordBatch]:
    specs = reader.repeatable(queue)
    if specs:
        yield _table(
            rows,
            queue,
            len(specs),
            {
                "key": [spec.key for spec in specs],
                "name": [spec.job_name for spec in specs],
                "every_ms": [_signed(spec.pattern.interval_ms) for spec in specs],
                "cron": [spec.pattern.expression for spec in specs],
                "tz": [spec.pattern.tz for spec in specs],
                "next_fire_at": times([spec.next_fire_ms for spec in specs]),
                "fire_limit": [_signed(spec.limit) for spec in specs],
                "start_after": times([spec.start_after_ms for spec in specs]),
                "end_before": times([spec.end_before_ms for spec in specs]),
                "missed_fires": [spec.missed_fires.kind for spec in specs],
                "max_catchup": [_signed(spec.missed_fires.max_catchup) for spec in specs],
                "retry": retries([spec.retry for spec in specs], len(specs), rows.schema.field("retry").type),
            },
        )


def _signed(value: int | None) -> int | None:
    return None if value is None else min(value, 2**63 - 1)


def _results(rows: Rows, reader: Reader, queue: str) -> Iterator[pa.RecordBatch]:
    for page in reader.results(queue):
        now_ms = time.time_ns() // 1_000_000
        ids = [name.encode(errors="surrogateescape").decode(errors="replace") for name, _, _ in page]
        nothing: list[None] = [None] * len(page)
        found = JobColumns(ids, nothing, [value for _, value, _ in page], nothing, nothing, None, None)  # type: ignore[arg-type]
        columns = rows.job_arrays(found, payload="result")
        columns["queue"] = pa.repeat(pa.scalar(queue, pa.string()), len(page))
        columns["expires_at"] = times([now_ms + left if left >= 0 else None for _, _, left in page])
        yield rows.finished(columns, [f"the result of job {job_id!r} of queue {queue!r}" for job_id in ids], None)


def _stats(rows: Rows, reader: Reader, queue: str, group: str) -> pa.RecordBatch:
    stats = reader.stats([queue], group)[queue]
    return _table(
        rows,
        queue,
        1,
        {name: [getattr(stats, name)] for name in rows.schema.names if name != "queue"},
    )
