"""Spark as a worker pool: jobs are taken by the driver, handlers run on executors, and every job is settled by
itself.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.types import StructType

from chasqui import ConfigError, OptionError
from chasqui.bridge import PayloadCodec, build
from chasqui_spark.committed import settle_from
from chasqui_spark.datasource import FORMAT, ChasquiDataSource
from chasqui_spark.ddl import columns_of
from chasqui_spark.handling import AnyHandler, Handling
from chasqui_spark.listener import attach
from chasqui_spark.options import SourceOptions, resolved, source_options
from chasqui_spark.pipeline import spark_options
from chasqui_spark.source import named_queues
from chasqui_spark.work_reader import COLUMNS, WorkReader, packed
from chasqui_spark.worker_arguments import WorkerArguments, check_handler, checked_trigger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_starting = threading.Lock()
_NOT_HERE = (
    *("mode", "ack", "view", "payload_schema", "filter_pushdown"),
    *("starting_offsets", "starting_timestamp", "ending_offsets", "ending_timestamp"),
)


def worker(
    spark: SparkSession,
    *,
    handler: AnyHandler,
    queue: str | None = None,
    queues: str | None = None,
    queue_pattern: str | None = None,
    url: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
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
    if not hasattr(spark, "readStream"):
        raise ConfigError(f"spark expects a SparkSession, got {type(spark).__name__}")
    chosen = _options(options, queue=queue, queues=queues, queue_pattern=queue_pattern, url=url)
    given = {"checkpoint": checkpoint, "name": name, "raw": raw, "datetimes": datetimes}
    own = build(WorkerArguments, given | {"concurrency": concurrency, "unknown_name": unknown_name})
    when = checked_trigger(trigger)
    check_handler(handler)
    codec = PayloadCodec(raw=own.raw, datetimes=own.datetimes)
    source: Any = _source_of(packed(Handling(handler, codec, chosen.store_results, own.concurrency, own.unknown_name)))
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        warnings.warn(
            "spark.speculation is true: Spark may run a slow task twice at the same time, and handlers with it; set it "
            "to false for this application",
            stacklevel=2,
        )
    settle_from(attach(spark), chosen)
    # Spark knows a format by its name until the query has started, so two workers must not start at the same time.
    with _starting:
        spark.dataSource.register(source)
        done = spark.readStream.format(source.name()).options(**spark_options(chosen)).load()
        writer = done.writeStream.format("noop")
        if own.checkpoint is not None:
            writer = writer.option("checkpointLocation", own.checkpoint)
        if own.name is not None:
            writer = writer.queryName(own.name)
        if when:
            writer = writer.trigger(**when)
        return writer.start()


def _options(options: dict[str, Any], **where: str | None) -> SourceOptions:
    for name in _NOT_HERE:
        if options.get(name) is not None:
            raise OptionError(f"{name} is the worker's own business: leave it out")
    given = {key: value for key, value in (options | where).items() if value is not None}
    named = [name for name in ("queue", "queues", "queue_pattern") if name in given]
    if len(named) != 1:
        raise OptionError(f"worker expects one of queue, queues and queue_pattern; got {' and '.join(named) or 'none'}")
    chosen = build(SourceOptions, given)
    named_queues(chosen)
    return replace(resolved(SourceOptions, spark_options(chosen)), mode="consume", ack="settle")


def _source_of(handler: bytes) -> type[ChasquiDataSource]:
    """A format whose rows are jobs that this handler has been run on. Its class travels with the handler in it."""

    class WorkSource(ChasquiDataSource):
        @classmethod
        def name(cls) -> str:
            return f"{FORMAT}_worker"

        def schema(self) -> StructType:
            super().schema()
            return columns_of("columns", COLUMNS)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
            return WorkReader(source_options(self.options, streaming=True), handler)

    return WorkSource
