"""How fast Spark works jobs off: claimed, read and settled, and with handlers on executors.

Spark runs in a process of its own and is warmed. A rate counts from the first trigger until the stream is empty, so
planning, checkpoints and settling are in it. Starting and ending a query, which take Spark a second, are not, and
neither are the start and the end of the loops and workers beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, compare, native_python, redis8, server, skipped
from benchmarks.worker import QUEUE, bare_loop, preload

JOBS = 500_000


class Spark:
    """A Spark process that works a queue off each time it is told to, a line of JSON at a time."""

    def __init__(self, url: str) -> None:
        environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
        environment |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        self._url = url
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spark_consume", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def rate(self, way: str, jobs: int, **options: Any) -> float:
        preload(self._url, jobs)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"way": way, "options": options}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if answer["left"]:
            raise RuntimeError(f"{answer['left']} jobs were not settled")
        return jobs / float(answer["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def _spark(url: str, way: str) -> Iterator[Spark]:
    spark = Spark(url)
    try:
        spark.rate(way, JOBS)
        yield spark
    finally:
        spark.close()


def consume_vs_bare_loop() -> Row:
    """Claim, read and settle 500,000 small jobs, ack=commit, local[2], against a loop of plain redis-py in one
    process.
    """
    with server() as valkey, _spark(valkey.url, "consume") as spark:

        def bare() -> float:
            preload(valkey.url, JOBS // 2)
            return bare_loop(valkey.url, JOBS // 2)

        return compare(
            "consume_vs_bare_loop",
            lambda: spark.rate("consume", JOBS),
            bare,
            target=0.35,
            unit="jobs/s",
            against="read 1000, decode, ack, in one process",
        )


def worker_batch_vs_native() -> Row:
    """worker() on local[2] with a handler of Arrow tables that does nothing, events on. Ours has its defaults, 100,000
    jobs a batch, two cores and a Java machine; the native one is one process that runs 100 handlers together.
    """
    binary, python = redis8(), native_python()
    against = "one chasquimq.Worker(concurrency=100)"
    name = "worker_batch_vs_native"
    if not binary or not python:
        return skipped(name, "needs Redis 8.10 and the wheel chasquimq", target=5.0, unit="jobs/s", against=against)
    with server(binary) as redis8_server, _spark(redis8_server.url, "worker") as spark:
        url = redis8_server.url

        def native() -> float:
            jobs = 40_000
            preload(url, jobs)
            command = [python, str(Path(__file__).with_name("native_worker.py")), url, QUEUE, str(jobs), "on"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            return float(json.loads(done.stdout.splitlines()[-1])["rate"])

        return compare(name, lambda: spark.rate("worker", JOBS), native, target=5.0, unit="jobs/s", against=against)


def _serve(url: str) -> None:
    """What runs in that process."""
    import redis
    from pyspark.sql import SparkSession

    from chasqui_spark import arrow_batch, worker

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")

    @arrow_batch()
    def nothing(_: Any) -> None:
        return None

    def query(way: str, home: str, options: dict[str, Any]) -> Any:
        if way == "worker":
            return worker(
                spark,
                url=url,
                queue=QUEUE,
                handler=nothing,
                checkpoint=home,
                trigger={"availableNow": True},
                **options,
            )
        jobs = spark.readStream.format("chasqui").options(url=url, queue=QUEUE, mode="consume", **options).load()
        return jobs.writeStream.format("noop").option("checkpointLocation", home).trigger(availableNow=True).start()

    plain, stream = redis.Redis.from_url(url), f"{{chasqui:{QUEUE}}}:stream"
    for line in sys.stdin:
        told = json.loads(line)
        with tempfile.TemporaryDirectory() as home:
            running = query(told["way"], home, told["options"])
            while running.isActive and plain.xlen(stream):
                time.sleep(0.01)
            end = datetime.now(UTC)
            running.awaitTermination()
        seconds = (end - min(datetime.fromisoformat(p.timestamp) for p in running.recentProgress)).total_seconds()
        left = plain.xlen(stream)
        print(json.dumps({"seconds": seconds, "left": left}), flush=True)


ROWS: dict[str, Callable[[], Row]] = {
    "consume_vs_bare_loop": consume_vs_bare_loop,
    "worker_batch_vs_native": worker_batch_vs_native,
}

if __name__ == "__main__":
    _serve(sys.argv[1])
