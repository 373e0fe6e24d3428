"""Spark as a worker pool: jobs are taken by the driver, handlers run on executors, and every job is settled by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from chasqui import OptionError
from chasqui.bridge import Outcomes, PayloadCodec, Settled, build
from chasqui_spark.committed import settle_from
from chasqui_spark.datasource import FORMAT, ChasquiDataSource
from chasqui_spark.handling import AnyHandler, Handling
from chasqui_spark.links import link_of
from chasqui_spark.listener import attach
from chasqui_spark.options import SourceOptions, resolved
from chasqui_spark.pipeline import spark_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_SETTLED = "done bigint, retried bigint, dead bigint, gone bigint"


def worker(
    spark: SparkSession,
    *,
    handler: AnyHandler,
    queue: str | None = None,
    queues: str | None = None,
    queue_pattern: str | None = None,
    url: str | None = None,
    checkpoint: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    name: str | None = None,
    raw: bool = False,
    datetimes: bool = False,
    concurrency: int = 100,
    unknown_name: str = "fail",
    **options: Any,
) -> StreamingQuery:
    """Work on queues with Spark; returns the running query.

    >>> query = worker(spark, queue="emails", handler=send_email, checkpoint="/var/lib/emails")

    ``handler`` is what a ``Consumer`` takes, or an ``arrow_batch``: a function of a job, a coroutine function
    (``concurrency`` of them at a time in each task), a ``Router`` by job name (``unknown_name`` decides about others),
    a ``batch`` handler. What it returns is the result, stored with ``store_results=True``; what it raises is a retry or
    a dead letter by the job's own rules, ``UnrecoverableError`` and ``RetryLater`` as ever.

    ``checkpoint`` is Spark's checkpointLocation; without one Spark makes a temporary one, and what a stopped query had
    taken is free when its claims are stale. ``trigger`` is Spark's: ``{"availableNow": True}`` drains what is there and
    stops, ``{"processingTime": "5 seconds"}`` takes jobs so often; by default batch follows batch. ``raw`` and
    ``datetimes`` are as in ``Consumer``; all other options are those of ``mode=consume``, in Python's spelling:
    ``max_attempts=5``, ``max_jobs_per_trigger=10_000``.
    """
    chosen = _options(dict(options, queue=queue, queues=queues, queue_pattern=queue_pattern, url=url))
    if unknown_name not in ("fail", "dlq"):
        raise OptionError(f"unknown_name expects one of fail, dlq; got {unknown_name!r:.80}")
    codec = PayloadCodec(raw=raw, datetimes=datetimes)
    handling = Handling(handler, codec, chosen.store_results, concurrency, unknown_name)
    source: Any = ChasquiDataSource
    spark.dataSource.register(source)
    settle_from(attach(spark), chosen)
    jobs = spark.readStream.format(FORMAT).options(**spark_options(chosen)).load()
    writer = jobs.mapInArrow(_runner(handling, chosen), _SETTLED).writeStream.format("noop")
    if checkpoint is not None:
        writer = writer.option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


def _options(given: dict[str, Any]) -> SourceOptions:
    for name in ("mode", "ack", "view", "payload_schema"):
        if given.get(name) is not None:
            raise OptionError(f"{name} is the worker's own business: leave it out")
    chosen = build(SourceOptions, {key: value for key, value in given.items() if value is not None})
    return replace(resolved(SourceOptions, spark_options(chosen)), mode="consume", ack="settle")


def _runner(
    handling: Handling, options: SourceOptions
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What each task does with its rows. Killed at any point: what was settled is settled, the rest is run again."""

    def run(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        total = Settled()
        link = link_of(options)
        for mixed in rows:
            for queue, batch in _by_queue(mixed):
                outcomes = Outcomes(link, queue, options)
                for told in handling.run(batch, outcomes.active):
                    total += outcomes.settle(told)
        counts = {"done": [total.done], "retried": [total.retried], "dead": [total.dead], "gone": [total.gone]}
        yield pa.RecordBatch.from_pydict(counts)

    return run


def _by_queue(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Tasks read one queue after the other, so nearly every batch has one."""
    column = batch.column("queue")
    for queue in pc.unique(column).to_pylist():
        yield queue, batch.filter(pc.equal(column, queue))
