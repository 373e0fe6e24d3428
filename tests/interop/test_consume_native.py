"""Spark and workers of the original in one group: every job is run by exactly one of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from pyspark.sql import SparkSession

from chasqui import Producer
from chasqui.bridge import Claims, ConnectionOptions, SettleTerms
from chasqui_spark import worker
from tests.spark.consume_tools import Seen, add, consume, gone, running, start
from tests.support import eventually


def test_a_queue_shared_with_native_workers_is_worked_off_once(
    spark: SparkSession,
    native_worker: Callable[..., Any],
    url: str,
    client: redis.Redis,
    queue: str,
    tmp_path: Path,
) -> None:
    seen = Seen()
    added = 1
    with running(start(consume(spark, url, queue, maxJobsPerTrigger="50"), tmp_path, seen)):
        add(url, queue, 1, name="n")
        eventually(lambda: seen.ids, within=60)
        native = native_worker(concurrency=5)
        while added < 4000 and not (native.runs and len(seen.ids) > 1):
            add(url, queue, 20, name="n")
            added += 20
        gone(client, queue)

    assert len(native.runs) + len(seen.ids) == added
    assert seen.doubled == []
    assert native.runs
    assert len(seen.ids) > 1


def test_a_job_that_spark_retries_is_done_by_a_native_worker(
    spark: SparkSession,
    native_worker: Callable[..., Any],
    producer: Producer,
    url: str,
    client: redis.Redis,
    queue: str,
    tmp_path: Path,
) -> None:
    def refuse(job: Any) -> None:
        raise ValueError("not here")

    producer.add({"a": 1}, name="n")
    query = worker(
        spark,
        url=url,
        queue=queue,
        handler=refuse,
        checkpoint=str(tmp_path),
        trigger={"availableNow": True},
        run_promoter=False,
        run_scheduler=False,
    )
    assert query.awaitTermination(120)

    (told,) = native_worker().wait_for_runs(1)
    gone(client, queue)

    assert told["attempt"] == 1


def test_what_a_stopped_driver_gives_back_goes_to_a_native_worker_at_once_and_unburned(
    native_worker: Callable[..., Any], url: str, client: redis.Redis, queue: str
) -> None:
    add(url, queue, 3, name="n")
    claims = Claims(ConnectionOptions(url=url), sid=uuid.uuid4().hex, terms=SettleTerms())
    assert claims.claim(queue, 1, limit=3) == 3
    native = native_worker()
    start = time.monotonic()

    assert claims.leave(1) == 3

    told = native.wait_for_runs(3)
    assert time.monotonic() - start < 20  # the threshold of staleness is 30 s
    gone(client, queue)
    assert {one["attempt"] for one in told} == {0}
