"""spark.readStream: batches, limits, restarts, queues that come and go, event time, and what the progress shows."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from chispa import assert_df_equality
from prometheus_client import CollectorRegistry
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, window

from chasqui import Producer
from chasqui.protocol.keys import Keys
from chasqui_spark import ChasquiQueryListener
from tests.conftest import skip_before_redis_7
from tests.spark.source_tools import Run, add, logged_offsets, stream, xadd_at
from tests.support import eventually

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"


def test_a_running_query_reads_each_entry_once(spark: SparkSession, url: str, queue: str, tmp_path: Path) -> None:
    add(url, queue, *range(5))
    run = Run(stream(spark, url, queue=queue), tmp_path)
    query = run.start()
    try:
        eventually(lambda: len(run.rows) == 5, within=60)
        add(url, queue, *range(5, 8))
        eventually(lambda: len(run.rows) >= 8, within=60)
    finally:
        query.stop()

    assert sorted(msgpack.unpackb(row.payload) for row in run.rows) == list(range(8))


def test_available_now_ends_and_leaves_later_entries_to_the_next_run(
    spark: SparkSession, url: str, queue: str, tmp_path: Path
) -> None:
    add(url, queue, *range(10))
    run = Run(stream(spark, url, queue=queue, maxJobsPerTrigger=4), tmp_path)

    def late(frame: Any, batch_id: int) -> None:
        add(url, queue, "late")

    query = (
        run.frame.writeStream.foreachBatch(late)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    ends = logged_offsets(tmp_path)

    assert len(ends) == 3
    assert [msgpack.unpackb(row.payload) for row in run.available_now()] == ["late"] * 3
    assert run.available_now() == []


def test_a_limit_does_not_starve_a_small_queue_beside_a_huge_one(
    spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path
) -> None:
    huge, small = f"{one_queue}-huge", f"{one_queue}-small"
    add(one_url, huge, *range(2000))
    add(one_url, small, *range(30))
    run = Run(stream(spark, one_url, queues=f"{huge},{small}", maxJobsPerTrigger=500), tmp_path)

    run.available_now()

    first = [row.queue for row in run.batches[0]]
    assert first.count(small) == 30
    assert first.count(huge) == 470
    assert [len(rows) for rows in run.batches] == [500, 500, 500, 500, 30]


def test_bytes_limit_a_batch_too(spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path) -> None:
    add(one_url, one_queue, *["x" * 1000] * 20)
    run = Run(stream(spark, one_url, queue=one_queue, maxBytesPerTrigger=5000), tmp_path)

    run.available_now()

    assert [len(rows) for rows in run.batches] == [5, 5, 5, 5]


def test_one_hot_queue_is_split_over_all_cores(
    spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, *range(400))
    run = Run(stream(spark, one_url, queue=one_queue, minPartitions=4), tmp_path)

    run.available_now()

    assert run.partitions == [4]
    assert sorted(msgpack.unpackb(row.payload) for row in run.rows) == list(range(400))


def test_latest_skips_what_is_there_and_nothing_after(
    spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, "old")
    run = Run(stream(spark, one_url, queue=one_queue, startingOffsets="latest"), tmp_path)

    assert run.available_now() == []
    add(one_url, one_queue, "new")
    assert [msgpack.unpackb(row.payload) for row in run.available_now()] == ["new"]


def test_latest_of_a_queue_that_does_not_exist_yet_misses_none_of_its_entries(
    spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path
) -> None:
    run = Run(stream(spark, one_url, queue=one_queue, startingOffsets="latest"), tmp_path)

    assert run.available_now() == []
    add(one_url, one_queue, "first")
    assert [msgpack.unpackb(row.payload) for row in run.available_now()] == ["first"]


def test_a_first_batch_that_was_logged_and_not_committed_is_read_again_as_it_was(
    spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path
) -> None:
    """What a crash between the offset log and the commit log leaves behind, made from a finished run."""
    add(one_url, one_queue, "skipped")
    run = Run(stream(spark, one_url, queue=one_queue, startingOffsets="latest", maxJobsPerTrigger=100), tmp_path)
    run.available_now()
    add(one_url, one_queue, *range(3))
    run.available_now()
    shutil.rmtree(tmp_path / "commits")
    for name in ("offsets/1", "offsets/.1.crc"):
        (tmp_path / name).unlink(missing_ok=True)
    run.batches.clear()

    run.available_now()

    assert [msgpack.unpackb(row.payload) for row in run.rows] == [0, 1, 2]


def test_an_idle_query_runs_no_batches(spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path) -> None:
    add(one_url, one_queue, 1)
    run = Run(stream(spark, one_url, queue=one_queue), tmp_path)
    query = run.start()
    try:
        eventually(lambda: run.rows, within=60)
        one = redis.Redis.from_url(one_url)
        calls = lambda: one.info("commandstats")["cmdstat_xrange"]["calls"]  # noqa: E731
        before = calls()
        eventually(lambda: calls() > before + 50, within=60)
    finally:
        query.stop()

    assert len(logged_offsets(tmp_path)) == 1


def test_queues_of_a_pattern_appear_and_vanish(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, tmp_path: Path
) -> None:
    add(one_url, f"{one_queue}-a", "a1")
    frame = stream(spark, one_url, queuePattern=f"{one_queue}-*", discoveryInterval=0, startingOffsets="latest")
    run = Run(frame, tmp_path)
    query = run.start()
    try:
        eventually(lambda: (tmp_path / "commits" / "0").exists(), within=60)
        add(one_url, f"{one_queue}-b", "b1")
        eventually(lambda: [msgpack.unpackb(r.payload) for r in run.rows] == ["b1"], within=60)
        one_client.delete(Keys(f"{one_queue}-b").stream)
        add(one_url, f"{one_queue}-a", "a2")
        eventually(lambda: len(run.rows) == 2, within=60)
        assert query.isActive
    finally:
        query.stop()

    assert set(logged_offsets(tmp_path)[-1]["queues"]) == {f"{one_queue}-a"}


@pytest.mark.parametrize("view", ["dlq", "events"])
def test_dead_letters_and_events_stream_too(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, tmp_path: Path, view: str
) -> None:
    key = getattr(Keys(one_queue), view)
    run = Run(stream(spark, one_url, queue=one_queue, view=view), tmp_path)
    for i in range(1, 4):
        xadd_at(one_client, key, f"{i}-0", e="active", id=f"j{i}", reason="malformed")

    assert [row.entry_id for row in run.available_now()] == ["1-0", "2-0", "3-0"]
    xadd_at(one_client, key, "4-0", e="active", id="j4")
    assert [row.entry_id for row in run.available_now()] == ["4-0"]


# --- Event time ---


def test_jobs_are_counted_in_windows_of_event_time(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, tmp_path: Path
) -> None:
    """A late job, older than the watermark of an earlier batch, is left out; each window is told once it is closed."""
    minute = 60_000
    noon = 1_795_003_200_000

    def put(*offsets_ms: int) -> None:
        for at in offsets_ms:
            envelope = msgpack.packb(["j", msgpack.packb(None), noon + at, 0])
            one_client.xadd(Keys(one_queue).stream, {"d": envelope})

    counted = (
        stream(spark, one_url, queue=one_queue)
        .withWatermark("created_at", "1 minute")
        .groupBy(window("created_at", "1 minute"))
        .count()
        .select(col("window.start").alias("start"), "count")
    )
    _windows(spark, counted, tmp_path, put, [(0, 1, minute + 1), (10 * minute,), (2,), (20 * minute,)])

    start = datetime.fromtimestamp(noon / 1000, UTC)
    expected = [(start, 2), (start + timedelta(minutes=1), 1), (start + timedelta(minutes=10), 1)]
    found = spark.table("windows").orderBy("start")
    assert_df_equality(found, spark.createDataFrame(expected, "start timestamp, count long"), ignore_nullable=True)


def test_events_are_counted_in_windows_of_event_time(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, tmp_path: Path
) -> None:
    def put(*seconds: int) -> None:
        for second in seconds:
            one_client.xadd(Keys(one_queue).events, {"e": "completed", "id": "j", "ts": str(second * 1000)})

    counted = (
        stream(spark, one_url, queue=one_queue, view="events")
        .withWatermark("created_at", "10 seconds")
        .groupBy(window("created_at", "10 seconds"), "event")
        .count()
        .select(col("window.start").alias("start"), "event", "count")
    )
    _windows(spark, counted, tmp_path, put, [(1, 2, 11), (100,)])

    expected = [(datetime.fromtimestamp(s, UTC), "completed", n) for s, n in ((0, 2), (10, 1))]
    found = spark.table("windows").orderBy("start")
    assert_df_equality(
        found, spark.createDataFrame(expected, "start timestamp, event string, count long"), ignore_nullable=True
    )


def _windows(spark: SparkSession, frame: Any, checkpoint: Path, put: Any, rounds: list[tuple[int, ...]]) -> None:
    """Run the aggregation once for each round of entries; what it told is in the view ``windows``."""
    told: list[Any] = []
    for offsets in rounds:
        put(*offsets)
        query = (
            frame.writeStream.foreachBatch(lambda rows, _: told.extend(rows.collect()))
            .outputMode("append")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
    spark.createDataFrame(told, frame.schema).createOrReplaceTempView("windows")


# --- Offsets in checkpoints ---


def test_offsets_are_written_as_the_golden_checkpoint_has_them(
    spark: SparkSession, url: str, queue: str, client: redis.Redis, tmp_path: Path
) -> None:
    skip_before_redis_7(client, "counters of what was added and deleted")
    key = Keys(queue).stream
    for i in range(1, 6):
        xadd_at(client, key, f"{i}-0")
    run = Run(
        stream(spark, url, queue=queue, startingTimestamp="1970-01-01T00:00:00.002", maxJobsPerTrigger=2), tmp_path
    )

    run.available_now()

    written = [json.dumps(one).replace(queue, "QUEUE") for one in logged_offsets(tmp_path)]
    assert written == (GOLDEN / "offsets-v1.jsonl").read_text().splitlines()


def test_a_checkpoint_of_version_1_is_resumed(
    spark: SparkSession, one_url: str, one_client: redis.Redis, tmp_path: Path
) -> None:
    """The checkpoint directory was written by a run over entries 1-0 to 3-0 of queue ``golden``."""
    key = Keys("golden").stream
    one_client.delete(key)
    for i in range(1, 6):
        xadd_at(one_client, key, f"{i}-0")
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "jobs-v1", checkpoint)

    run = Run(stream(spark, one_url, queue="golden"), checkpoint)

    assert [row.entry_id for row in run.available_now()] == ["4-0", "5-0"]
    one_client.delete(key)


def test_an_offset_of_another_source_is_refused(
    spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, 1)
    run = Run(stream(spark, one_url, queue=one_queue), tmp_path)
    run.available_now()
    log = tmp_path / "offsets" / "0"
    log.write_text(log.read_text().replace('"v": 1', '"v": 9'))
    (tmp_path / "offsets" / ".0.crc").unlink(missing_ok=True)

    with pytest.raises(PySparkException, match=r"its version is 9, this program reads 1"):
        run.available_now()


# --- What is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"view": "stats"}, "view stats can be read by spark.read only"),
        ({"endingOffsets": "latest"}, "endingOffsets ends a batch read"),
        ({"maxJobsPerTrigger": "0"}, "maxJobsPerTrigger expects a whole number, at least 1"),
    ],
)
def test_a_stream_refuses(
    spark: SparkSession, one_url: str, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        Run(stream(spark, one_url, queue="q", **options), tmp_path).available_now()


# --- Progress ---


def test_the_progress_and_the_listener_show_the_lag(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, tmp_path: Path
) -> None:
    keys = Keys(one_queue)
    add(one_url, one_queue, 1, 2, 3)
    with Producer(one_url, queue=one_queue) as producer:
        producer.add_in(600_000, "later")
    one_client.xadd(keys.dlq, {"d": "x"})
    one_client.xgroup_create(keys.stream, "default", id="0")
    one_client.xreadgroup("default", "c", {keys.stream: ">"}, count=1)
    registry = CollectorRegistry()
    listener = ChasquiQueryListener(registry)
    told: list[Any] = []
    listener.on_committed(lambda _: 1 / 0)
    listener.on_committed(told.append)
    spark.streams.addListener(listener)
    try:
        run = Run(stream(spark, one_url, queue=one_queue), tmp_path)
        query = run.start(availableNow=True)
        assert query.awaitTermination(60)
        eventually(lambda: one_queue in listener.figures, within=30)
    finally:
        spark.streams.removeListener(listener)

    reported = json.loads(query.lastProgress.sources[0].latestOffset)["queues"][one_queue]
    assert (reported["depth"], reported["pending"], reported["delayed"], reported["dlq"]) == (3, 1, 1, 1)
    assert reported["oldest_age_ms"] >= 0
    stats = listener.figures[one_queue]
    assert (stats.waiting, stats.pending, stats.delayed, stats.dlq) == (2, 1, 1, 1)
    assert registry.get_sample_value("chasqui_queue_depth", {"queue": one_queue, "state": "waiting"}) == 2
    assert registry.get_sample_value("chasqui_queue_oldest_age_seconds", {"queue": one_queue}) is not None
    assert told[0].batchId == 0
