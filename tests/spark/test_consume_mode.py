"""Spark as a member of a consumer group, while nobody is killed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession

import chasqui_spark
from chasqui import Consumer, embedded
from chasqui_spark.listener import attach
from tests.engine.breaks import KEEPS_DATA
from tests.spark.consume_tools import Seen, add, consume, drained, gone, pending, running, start, waiting
from tests.support import eventually


@pytest.fixture
def listening(spark: SparkSession, one_url: str) -> None:
    chasqui_spark.register(spark, one_url)


@contextlib.contextmanager
def ordinary_worker(url: str, queue: str, **options: Any) -> Iterator[list[str]]:
    """A worker of the engine in a thread; yields the entry ids that it has run."""
    ran: list[str] = []
    consumer = Consumer(url, queue=queue, block_ms=50, delayed_enabled=False, run_scheduler=False, **options)

    async def handler(job: Any) -> None:
        ran.append(job.entry_id)

    thread = threading.Thread(target=lambda: asyncio.run(consumer.run(handler)), daemon=True)
    thread.start()
    yield ran
    consumer.stop()
    thread.join(10)


def test_available_now_drains_settles_and_reads_nothing_twice(
    spark: SparkSession, url: str, client: redis.Redis, queue: str, tmp_path: Path
) -> None:
    add(url, queue, 250)
    seen = Seen()
    jobs = consume(spark, url, queue, maxJobsPerTrigger="100")

    drained(jobs, tmp_path, seen)
    assert waiting(client, queue) == 0
    add(url, queue, 5)
    drained(jobs, tmp_path, seen)

    assert seen.batches == [100, 100, 50, 5]
    assert seen.doubled == []
    assert pending(client, queue) == {}


def test_one_batch_then_silence_and_its_jobs_are_gone_within_a_second(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    took: list[float] = []
    query = start(consume(spark, one_url, one_queue), tmp_path, lambda jobs, _: jobs.count() and None)
    with running(query):
        for batch in range(3):
            add(one_url, one_queue, 20)
            log = tmp_path / "commits" / str(batch)
            eventually(log.exists, within=60)
            gone(one_client, one_queue, within=20)
            took.append(time.time() - log.stat().st_mtime)
    assert sorted(took)[1] < 1  # one of three may meet a pause of this machine


def test_the_listener_settles_although_the_next_trigger_is_far_away(
    spark: SparkSession, listening: None, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, 20)
    with running(start(consume(spark, one_url, one_queue), tmp_path, Seen(), processingTime="1 hour")):
        gone(one_client, one_queue)
    assert [key for key in one_client.keys(f"{{chasqui:{one_queue}}}*") if b":batch:" in key] == []


def test_a_stopped_query_gives_back_unrun_jobs_and_no_committed_one_is_run_again(
    spark: SparkSession, listening: None, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    block, held, done = tmp_path / "block", tmp_path / "held", tmp_path / "done"

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for one in batches:
            if block.exists():
                held.touch()
                time.sleep(60)
            with done.open("a") as file:
                file.writelines(f"{entry}\n" for entry in one.column("entry_id").to_pylist())
            yield one

    jobs = consume(spark, one_url, one_queue, maxJobsPerTrigger="10")
    ready = jobs.mapInArrow(run, jobs.schema).writeStream.format("noop")
    query = ready.option("checkpointLocation", str(tmp_path / "c")).start()
    add(one_url, one_queue, 10)
    gone(one_client, one_queue)
    block.touch()
    add(one_url, one_queue, 20)
    eventually(held.exists, within=60)
    query.stop()

    def free() -> bool:
        return [idle >= 30_000 and n == 0 for _, idle, n in pending(one_client, one_queue).values()] == [True] * 10

    eventually(free, within=30)  # Spark lets the tasks run on for some seconds
    with ordinary_worker(one_url, one_queue) as ran:
        gone(one_client, one_queue)
    assert len(ran) == 20
    assert set(ran).isdisjoint(done.read_text().split())
    again = Seen()
    drained(consume(spark, one_url, one_queue), tmp_path / "c", again)
    assert again.ids == []


def test_a_batch_longer_than_the_threshold_is_not_run_by_a_greedy_worker_too(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, 10)
    seen = Seen()

    def each(jobs: DataFrame, number: int) -> None:
        seen(jobs, number)
        time.sleep(2.5)

    query = start(consume(spark, one_url, one_queue, claimMinIdleMs="600"), tmp_path, each)
    with running(query):
        eventually(lambda: len(seen.ids) == 10, within=60)
        stream = f"{{chasqui:{one_queue}}}:stream"
        add(one_url, one_queue, 1)
        ((_, ((control, _),)),) = one_client.xreadgroup("default", "dead", {stream: ">"})
        with ordinary_worker(one_url, one_queue, claim_min_idle_ms=600) as ran:
            gone(one_client, one_queue)
    assert ran == [control.decode()]


def test_spark_and_an_ordinary_worker_share_a_queue_and_run_every_job_once(
    spark: SparkSession, url: str, client: redis.Redis, queue: str, tmp_path: Path
) -> None:
    seen = Seen()
    query = start(consume(spark, url, queue, maxJobsPerTrigger="50"), tmp_path, seen)
    with running(query), ordinary_worker(url, queue) as ran:
        for _ in range(20):
            add(url, queue, 20)
        gone(client, queue)
    assert len(ran) + len(seen.ids) == len({*ran, *seen.ids}) == 400


def test_jobs_of_a_dead_worker_are_taken_over(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, 3)
    stream = f"{{chasqui:{one_queue}}}:stream"
    one_client.xgroup_create(stream, "default", 0)
    one_client.xreadgroup("default", "dead", {stream: ">"}, count=2)
    one_client.xclaim(stream, "default", "dead", 0, list(pending(one_client, one_queue)), idle=60_000, justid=True)
    seen = Seen()

    drained(consume(spark, one_url, one_queue), tmp_path, seen)

    assert len(seen.ids) == 3


def test_an_old_checkpoint_settles_nothing_that_a_newer_one_has(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, 5)
    drained(consume(spark, one_url, one_queue), tmp_path / "old", Seen())
    add(one_url, one_queue, 10)
    held, go = threading.Event(), threading.Event()

    def slow(jobs: DataFrame, _: int) -> None:
        jobs.count()
        held.set()
        go.wait(60)

    with running(start(consume(spark, one_url, one_queue), tmp_path / "new", slow)):
        assert held.wait(60)
        old = Seen()
        drained(consume(spark, one_url, one_queue), tmp_path / "old", old)
        assert old.ids == []
        assert len(pending(one_client, one_queue)) == 10
        go.set()
        gone(one_client, one_queue)


def test_what_is_no_job_or_has_no_run_left_is_a_dead_letter_and_the_rest_are_rows(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    stream = f"{{chasqui:{one_queue}}}:stream"
    add(one_url, one_queue, 2)
    one_client.xadd(stream, {"d": b"\xc1"})
    one_client.xadd(stream, {"x": b"1"})
    one_client.xadd(stream, {"d": b"x" * 2000})
    seen = Seen()

    drained(consume(spark, one_url, one_queue, maxPayloadBytes="1000"), tmp_path, seen)

    reasons = [fields[b"reason"].decode() for _, fields in one_client.xrange(f"{{chasqui:{one_queue}}}:dlq")]
    assert sorted(reasons) == ["decode_failed", "malformed", "oversize_payload"]
    assert len(seen.ids) == 2
    assert waiting(one_client, one_queue) == 0


def test_several_queues_share_the_limit_and_none_is_starved(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, 60)
    add(one_url, f"{one_queue}-b", 6)
    batches: list[dict[str, int]] = []

    def each(jobs: DataFrame, _: int) -> None:
        batches.append({row.queue: row["count"] for row in jobs.groupBy("queue").count().collect()})

    jobs = consume(spark, one_url, one_queue, queues=f"{one_queue},{one_queue}-b", maxJobsPerTrigger="20")
    drained(jobs, tmp_path, each)

    assert batches[0] == {one_queue: 14, f"{one_queue}-b": 6}
    assert sum(sum(batch.values()) for batch in batches) == 66


def test_async_progress_tracking_is_refused(spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path) -> None:
    add(one_url, one_queue, 40)
    jobs = consume(spark, one_url, one_queue, maxJobsPerTrigger="10")
    query = (
        jobs.writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .option("asyncProgressTrackingEnabled", "true")
        .option("asyncProgressTrackingCheckpointIntervalMs", "60000")
        .start()
    )
    with running(query), pytest.raises(Exception, match="asyncProgressTrackingEnabled"):
        query.awaitTermination(60)


def test_a_server_that_is_restarted_loses_no_job(spark: SparkSession, tmp_path: Path) -> None:
    home = tmp_path / "server"
    home.mkdir()
    with embedded.start(config=KEEPS_DATA | {"appendfsync": "always"}, directory=home) as server:
        url, port = server.url, server.port
        add(url, "q", 40)
        seen = Seen()
        query = start(consume(spark, url, "q", maxJobsPerTrigger="10", reconnectInitialMs="50"), tmp_path / "c", seen)
        with running(query):
            eventually(lambda: seen.ids, within=60)
            server.stop()
            with embedded.start(config=KEEPS_DATA | {"appendfsync": "always"}, directory=home, port=port) as again:
                with redis.Redis.from_url(again.url) as client:
                    eventually(lambda: waiting(client, "q") == 0 or not query.isActive, within=60)
                    if not query.isActive:
                        drained(consume(spark, again.url, "q"), tmp_path / "c", seen)
                    gone(client, "q")
                query.stop()
        assert len(set(seen.ids)) == 40


def test_two_listeners_are_one(spark: SparkSession, one_url: str) -> None:
    chasqui_spark.register(spark, one_url)
    before = len(attach(spark)._committed)

    chasqui_spark.register(spark, one_url)

    assert len(attach(spark)._committed) == before
