"""How fast a queue becomes a DataFrame, how long planning takes, and in how much memory. Spark runs as local[2]."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import redis

from benchmarks.harness import Row, compare, server
from chasqui import Producer

JOBS, MANY, FEW = 1_000_000, 5_000_000, 10_000
SCHEMA = "to STRING, n INT, score DOUBLE"
QUEUE = "bench"
PAGE = 1000
NOTE = "CHASQUI_BENCH_NOTE"  # where the worker notes its peak; the JVM hands its environment on


def source_vs_xrange() -> Row:
    """The jobs view into the noop sink, against a bare client that pages XRANGE over the same stream."""
    with _filled(JOBS) as url:
        return compare(
            "source_vs_xrange",
            lambda: _streamed(url),
            lambda: _bare(url),
            target=0.5,
            unit="rows/s",
            against="redis-py, XRANGE pages, replies left raw",
        )


def source_schema_vs_xrange() -> Row:
    """The same with three fields of the payload decoded."""
    with _filled(JOBS) as url:
        return compare(
            "source_schema_vs_xrange",
            lambda: _streamed(url, payloadSchema=SCHEMA),
            lambda: _bare(url),
            target=0.25,
            unit="rows/s",
            against="redis-py, XRANGE pages, replies left raw",
        )


def source_arrow_vs_rows() -> Row:
    """Arrow record batches against the same source yielding Python rows, which Spark then converts one by one."""
    with _filled(JOBS) as url:
        return compare(
            "source_arrow_vs_rows",
            lambda: _streamed(url),
            lambda: _streamed(url, format="chasqui_rows"),
            target=4,
            unit="rows/s",
            against="the same source yielding Python rows",
        )


def source_plan_growth() -> Row:
    """Time to plan a batch of a million entries, against one of ten thousand; no limit, eight partitions."""
    from chasqui_spark.options import source_options
    from chasqui_spark.stream_reader import StreamReader
    from chasqui_spark.views import schema_of

    def planning(url: str) -> float:
        options = source_options({"url": url, "queue": QUEUE, "minPartitions": "8"})
        reader = StreamReader(options, schema_of(options))
        start, limit = reader.initialOffset(), reader.getDefaultReadLimit()
        took = []
        for _ in range(50):
            began = time.perf_counter()
            reader.partitions(start, reader.latestOffset(start, limit))
            took.append(time.perf_counter() - began)
        return statistics.median(took) * 1e6

    with _filled(JOBS) as large, _filled(FEW) as small:
        return compare(
            "source_plan_growth",
            lambda: planning(large),
            lambda: planning(small),
            target=1.5,
            unit="µs a plan",
            against=f"{FEW:,} entries",
            at_most=True,
        )


def source_worker_memory() -> Row:
    """Peak memory of the Python worker that reads five million rows in one partition, against 300 MB."""
    with _filled(MANY) as url:

        def peak() -> float:
            _streamed(url, format="chasqui_measured", minPartitions=1, payloadSchema=SCHEMA)
            return float(Path(os.environ[NOTE]).read_text()) / 1024

        return compare(
            "source_worker_memory",
            peak,
            lambda: 300.0,
            target=1.0,
            unit="MB at the peak",
            against="300 MB",
            at_most=True,
            repeats=1,
        )


ROWS: dict[str, Callable[[], Row]] = {
    "source_vs_xrange": source_vs_xrange,
    "source_schema_vs_xrange": source_schema_vs_xrange,
    "source_arrow_vs_rows": source_arrow_vs_rows,
    "source_plan_growth": source_plan_growth,
    "source_worker_memory": source_worker_memory,
}


@contextmanager
def _filled(jobs: int) -> Iterator[str]:
    with server() as valkey:
        with Producer(valkey.url, queue=QUEUE, max_stream_len=10 * jobs) as producer:
            for start in range(0, jobs, 1000):
                producer.add_bulk_named([("mail", {"to": "ana", "n": start + i, "score": 0.5}) for i in range(1000)])
        yield valkey.url


def _bare(url: str) -> float:
    """Rows a second of a client that only pages."""
    with redis.Redis.from_url(url, protocol=2) as client:
        client.response_callbacks.clear()
        start, seen, began = "-", 0, time.perf_counter()
        while True:
            page: Any = client.execute_command("XRANGE", f"{{chasqui:{QUEUE}}}:stream", start, "+", "COUNT", PAGE)
            if not page:
                return seen / (time.perf_counter() - began)
            seen += len(page)
            start = "(" + page[-1][0].decode()


@cache
def _spark() -> Any:
    from pyspark.sql import SparkSession

    # Workers import the sources below from this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    os.environ[NOTE] = str(Path(tempfile.mkdtemp()) / "peak")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    from benchmarks.spark_row_source import MeasuredSource, RowSource

    spark.dataSource.register(RowSource)
    spark.dataSource.register(MeasuredSource)
    # Java compiles what runs often: one run as long as those that count, or it would do so while they are measured.
    with _filled(JOBS) as url:
        for name in ("chasqui", "chasqui_rows", "chasqui_measured"):
            _stream(spark, url, name, {})
    return spark


def _streamed(url: str, *, format: str = "chasqui", **options: Any) -> float:
    return _stream(_spark(), url, format, options)


def _stream(spark: Any, url: str, format: str, options: dict[str, Any]) -> float:
    """Rows a second of one batch with everything in it, without the start of the query."""
    folder = tempfile.mkdtemp()
    try:
        query = (
            spark.readStream.format(format)
            .options(url=url, queue=QUEUE, **options)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", folder)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress = next(p for p in query.recentProgress if p.numInputRows)
        return float(progress.numInputRows * 1000 / progress.durationMs["triggerExecution"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
