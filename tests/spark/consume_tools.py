"""Queries of ``mode=consume`` for tests: started in the shared session, or in a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from pyspark.sql import DataFrame, SparkSession

from chasqui import Producer
from tests.support import eventually

QUIET = {"runPromoter": "false", "runScheduler": "false", "leaseTtl": "2s"}
Each = Callable[[DataFrame, int], None]


def add(url: str, queue: str, count: int, **options: Any) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(list(range(count)), **options)


def waiting(client: redis.Redis, queue: str) -> int:
    return int(client.xlen(f"{{chasqui:{queue}}}:stream"))


def pending(client: redis.Redis, queue: str) -> dict[bytes, tuple[str, int, int]]:
    """Owner, idle time and deliveries, by entry id."""
    found = client.xpending_range(f"{{chasqui:{queue}}}:stream", "default", "-", "+", 10_000)
    return {p["message_id"]: (p["consumer"].decode(), p["time_since_delivered"], p["times_delivered"]) for p in found}


def gone(client: redis.Redis, queue: str, within: float = 60) -> None:
    """Wait until no job is left in the stream."""
    eventually(lambda: not waiting(client, queue), within=within)


def consume(spark: SparkSession, url: str, queue: str, **options: str) -> DataFrame:
    given = {"url": url, "mode": "consume", **QUIET, **options}
    if "queues" not in given and "queuePattern" not in given:
        given["queue"] = queue
    return spark.readStream.format("chasqui").options(**given).load()


def start(jobs: DataFrame, checkpoint: Path, each: Each, *, available: bool = False, **trigger: Any) -> Any:
    writer = jobs.writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(each)
    if available:
        trigger = {"availableNow": True}
    return (writer.trigger(**trigger) if trigger else writer).start()


def drained(jobs: DataFrame, checkpoint: Path, each: Each) -> None:
    """Run with AvailableNow to the end."""
    query = start(jobs, checkpoint, each, available=True)
    assert query.awaitTermination(120)


@contextmanager
def running(query: Any) -> Iterator[Any]:
    try:
        yield query
    finally:
        query.stop()


class Seen:
    """Collects what batches held: entry ids, in order."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.batches: list[int] = []

    def __call__(self, jobs: DataFrame, _: int) -> None:
        found = [row.entry_id for row in jobs.select("entry_id").collect()]
        self.ids += found
        self.batches.append(len(found))

    @property
    def doubled(self) -> list[str]:
        return [entry for entry, times in Counter(self.ids).items() if times > 1]


@contextmanager
def driver(url: str, queue: str, home: Path, die: str = "", **options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in a process group of its own; entry ids that it has processed are in ``home/seen``."""
    about = {"url": url, "queue": queue, "home": str(home), "die": die, "options": QUIET | options}
    environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    with (home / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.consume_driver", json.dumps(about)],
            start_new_session=True,
            env=environment,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[2],
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the driver, its JVM and all their children, as a machine that loses power does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def processed(home: Path) -> list[str]:
    seen = home / "seen"
    return seen.read_text().split() if seen.exists() else []
