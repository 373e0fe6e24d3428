"""spark.read: all views, every option that narrows, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest
import redis
from chispa import assert_df_equality
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from chasqui import Backoff, MissedFires, NewJob, Producer, RepeatableSpec, RepeatPattern, RetryOverride
from chasqui.protocol.keys import Keys
from tests.conftest import is_redis_6
from tests.spark.source_tools import add, batch, xadd_at

EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)  # as Spark hands times over


def test_jobs_have_all_their_columns(spark: SparkSession, url: str, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add({"n": 1}, id="a", name="mail", retry=RetryOverride(7, Backoff.fixed(250)))

    (row,) = batch(spark, url, queue=queue).collect()

    assert (row.queue, row.id, row.name, row.attempt, row.error) == (queue, "a", "mail", 0, None)
    assert msgpack.unpackb(row.payload) == {"n": 1}
    assert row.retry.asDict(recursive=True) == {
        "max_attempts": 7,
        "backoff": {"kind": "fixed", "delay_ms": 250, "max_delay_ms": None, "multiplier": None, "jitter_ms": None},
    }
    assert int(row.enqueued_at.replace(tzinfo=UTC).timestamp() * 1000) == int(row.entry_id.split("-")[0])
    assert abs((row.enqueued_at - row.created_at).total_seconds()) < 5


def test_sql_reads_a_queue_as_a_view(spark: SparkSession, one_url: str, one_queue: str) -> None:
    add(one_url, one_queue, {"to": "ana", "n": 1}, {"to": "bo", "n": 2})
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW mails USING chasqui OPTIONS (url '{one_url}', queue '{one_queue}', "
        "payloadSchema 'to STRING, n INT')"
    )

    found = spark.sql("SELECT payload.to AS to, payload.n AS n FROM mails WHERE payload.n > 1")

    assert_df_equality(found, spark.createDataFrame([("bo", 2)], "to string, n int"))


def test_events_tell_what_happened(spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis) -> None:
    key = Keys(one_queue).events
    xadd_at(one_client, key, "5-0", e="failed", id="a", ts="7", n="mail", attempt="2", reason="boom", duration_us="9")
    xadd_at(one_client, key, "6-0", e="drained", id="", ts="odd", attempt="99999999999999999999", extra="x")

    first, second = batch(spark, one_url, queue=one_queue, view="events").orderBy("entry_id").collect()

    assert first.asDict() == {
        "queue": one_queue, "entry_id": "5-0", "event": "failed", "id": "a", "name": "mail",
        "created_at": EPOCH + timedelta(milliseconds=7), "enqueued_at": EPOCH + timedelta(milliseconds=5),
        "attempt": 2, "duration_us": 9, "backoff_ms": None, "delay_ms": None, "reason": "boom", "fields": {},
    }  # fmt: skip
    assert (second.event, second.id, second.attempt) == ("drained", None, None)
    assert second.fields == {"attempt": "99999999999999999999", "extra": "x", "ts": "odd"}


def test_dead_letters_say_why(spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis) -> None:
    envelope = msgpack.packb(["a", msgpack.packb({"n": 1}), 1_794_978_620_538, 3])
    key = Keys(one_queue).dlq
    one_client.xadd(
        key, {"d": envelope, "n": "mail", "source_id": "4-0", "reason": "retries_exhausted", "error": "boom"}
    )
    one_client.xadd(key, {"d": b"", "source_id": "5-0", "reason": "malformed", "detail": "no job"})

    good, bad = batch(spark, one_url, queue=one_queue, view="dlq", payloadSchema="n INT").orderBy("entry_id").collect()

    assert (good.id, good.name, good.payload.n, good.attempt, good.source_id) == ("a", "mail", 1, 3, "4-0")
    assert (good.reason, good.detail, good.failure, good.error) == ("retries_exhausted", None, "boom", None)
    assert (bad.id, bad.payload, bad.reason, bad.detail) == (None, None, "malformed", "no job")
    assert bad.error


def test_pending_delayed_results_and_stats_list_what_is_there(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis
) -> None:
    keys = Keys(one_queue)
    with Producer(one_url, queue=one_queue) as producer:
        producer.add_bulk([1, 2, 3])
        producer.add_bulk_jobs([NewJob({"n": i}, delay_ms=600_000 + i) for i in range(300)])
    one_client.xgroup_create(keys.stream, "default", id="0")
    one_client.xreadgroup("default", "c-1", {keys.stream: ">"}, count=2)
    one_client.set(keys.result("job-1"), msgpack.packb({"n": 5}), ex=100)

    def rows(view: str, **more: str) -> list[Any]:
        return batch(spark, one_url, queue=one_queue, view=view, **more).collect()

    pending = rows("pending")
    assert [(r.consumer, r.deliveries) for r in pending] == [("c-1", 1)] * 2
    assert all(r.enqueued_at is not None and r.idle_ms >= 0 for r in pending)
    delayed = rows("delayed", payloadSchema="n INT")
    assert [r.payload.n for r in delayed] == list(range(300))
    assert all(abs((r.run_at - r.created_at).total_seconds() - 600) < 5 for r in delayed)
    (result,) = rows("results", payloadSchema="n INT")
    assert (result.id, result.result.n, result.error) == ("job-1", 5, None)
    assert result.expires_at is not None
    (stats,) = rows("stats")
    assert (stats.waiting, stats.pending, stats.delayed, stats.dlq, stats.paused) == (1, 2, 300, 0, False)


def test_repeatable_jobs_are_listed(spark: SparkSession, one_url: str, one_queue: str) -> None:
    with Producer(one_url, queue=one_queue) as producer:
        producer.upsert_repeatable(
            RepeatableSpec(
                "report", RepeatPattern.cron("0 9 * * *", "Europe/Madrid"), None, missed_fires=MissedFires.fire_all(3)
            )
        )
        producer.upsert_repeatable(RepeatableSpec("tick", RepeatPattern.every(60_000), None, limit=4))

    rows = {r.name: r for r in batch(spark, one_url, queue=one_queue, view="repeatable").collect()}

    assert (rows["report"].cron, rows["report"].tz, rows["report"].missed_fires) == (
        "0 9 * * *",
        "Europe/Madrid",
        "fire_all",
    )
    assert (rows["report"].max_catchup, rows["tick"].every_ms, rows["tick"].fire_limit) == (3, 60_000, 4)
    assert rows["tick"].next_fire_at > EPOCH


# --- Ranges ---


@pytest.fixture
def numbered(one_client: redis.Redis, one_queue: str) -> str:
    """A queue whose entries 1-0 to 9-0, in milliseconds since 1970, hold the payloads 1 to 9."""
    for i in range(1, 10):
        envelope = msgpack.packb([f"j{i}", msgpack.packb({"n": i}), 1000 + i, 0])
        xadd_at(one_client, Keys(one_queue).stream, f"{i}-0", d=envelope)
    return one_queue


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(1, 10)),
        ({"startingOffsets": '{"QUEUE": "3-0"}'}, range(3, 10)),
        ({"startingOffsets": "latest"}, ()),
        ({"endingOffsets": '{"QUEUE": "3-0"}'}, range(1, 4)),
        ({"endingOffsets": '{"QUEUE": "3"}'}, range(1, 4)),
        ({"startingTimestamp": "1970-01-01T00:00:00.004", "endingTimestamp": "1970-01-01T00:00:00.006"}, (4, 5)),
        ({"startingTimestamp": "1970-01-01T00:00:00.008Z"}, (8, 9)),
        ({"minPartitions": "4"}, range(1, 10)),
        ({"jobsPerPartition": "2"}, range(1, 10)),
    ],
)
def test_a_range_is_read_as_asked_for(
    spark: SparkSession, one_url: str, numbered: str, options: dict[str, str], expected: Any
) -> None:
    options = {name: value.replace("QUEUE", numbered) for name, value in options.items()}

    found = batch(spark, one_url, queue=numbered, payloadSchema="n INT", **options).select("payload.n").collect()

    assert sorted(row.n for row in found) == list(expected)


def test_partitions_are_as_many_and_as_small_as_asked_for(spark: SparkSession, one_url: str, numbered: str) -> None:
    many = batch(spark, one_url, queue=numbered, minPartitions=4)
    small = batch(spark, one_url, queue=numbered, jobsPerPartition=2)

    assert many.rdd.getNumPartitions() >= 4
    assert [len(rows) for rows in small.rdd.glom().collect()] == [2, 2, 2, 2, 1]


def test_several_queues_and_a_pattern(spark: SparkSession, one_url: str, one_queue: str) -> None:
    names = [f"{one_queue}-{c}" for c in "abc"]
    for name in names:
        add(one_url, name, name)

    both = batch(spark, one_url, queues=f"{names[0]}, {names[2]}").select("queue").collect()
    all_of_them = batch(spark, one_url, queuePattern=f"{one_queue}-*").select("queue").collect()

    assert sorted(r.queue for r in both) == [names[0], names[2]]
    assert sorted(r.queue for r in all_of_them) == names


# --- Bad jobs ---


@pytest.mark.parametrize("bad", [None, "null"])
def test_an_entry_that_is_no_job_is_a_row_that_says_so(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, bad: str | None
) -> None:
    one_client.xadd(Keys(one_queue).stream, {"x": "y"})
    add(one_url, one_queue, {"n": "text"}, {"n": 2})
    options = {"badJobs": bad} if bad else {}

    rows = batch(spark, one_url, queue=one_queue, payloadSchema="n INT", **options).orderBy("entry_id").collect()

    assert [row.payload and row.payload.n for row in rows] == [None, None, 2]
    assert [row.error for row in rows] == [
        "the entry has no field d",
        "payload.n is text, INT does not hold it",
        None,
    ]


def test_bad_jobs_can_fail_the_query(spark: SparkSession, one_url: str, one_queue: str) -> None:
    add(one_url, one_queue, {"n": "text"})

    with pytest.raises(PySparkException, match=r"entry \d+-0 of queue .*payload\.n is text"):
        batch(spark, one_url, queue=one_queue, payloadSchema="n INT", badJobs="fail").collect()


# --- Filters ---

FILTERS = [
    "entry_id = '3-0'",
    "entry_id IN ('3-0', '5-0', '99-0')",
    "entry_id > '3-0' AND entry_id <= '7-0'",
    "enqueued_at >= timestamp'1970-01-01 00:00:00.004' AND enqueued_at < timestamp'1970-01-01 00:00:00.006'",
    "enqueued_at = timestamp'1970-01-01 00:00:00.004'",
    "created_at > timestamp'1970-01-01 00:00:01.005'",
    "queue = 'nobody'",
    "id = 'j4' OR entry_id = '1-0'",
]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_filters_give_the_same_rows_pushed_down_or_not(
    spark: SparkSession, one_url: str, numbered: str, zone: str
) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        for condition in FILTERS:
            plain = batch(spark, one_url, queue=numbered).where(condition)
            pushed = batch(spark, one_url, queue=numbered, filterPushdown="true").where(condition)
            assert sorted(r.id for r in pushed.collect()) == sorted(r.id for r in plain.collect()), condition
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
        spark.conf.set("spark.sql.session.timeZone", "UTC")


# --- What is refused ---

REFUSED = [
    ({"queu": "x", "queue": "q"}, "unknown option 'queu'; did you mean queue"),
    ({"queue": "q", "queues": "a,b"}, "got queue and queues"),
    ({}, "exactly one of queue, queues and queuePattern is expected, got none"),
    ({"queue": "a{b"}, "queue expects a name without braces"),
    ({"queues": " , "}, "queues expects names"),
    ({"queuePattern": "{*}"}, "queuePattern expects a glob"),
    ({"queue": "q", "view": "nope"}, "view expects one of jobs"),
    ({"queue": "q", "startingOffsets": "{x"}, "startingOffsets expects earliest, latest, or JSON"),
    ({"queue": "q", "startingOffsets": '{"q": 5}'}, "startingOffsets expects"),
    ({"queue": "q", "startingOffsets": '{"other": "5-0"}'}, "startingOffsets names 'other'"),
    ({"queue": "q", "endingOffsets": "earliest"}, "endingOffsets expects latest, or JSON"),
    ({"queue": "q", "startingTimestamp": "yesterday"}, "startingTimestamp expects ISO text"),
    ({"queue": "q", "startingTimestamp": "0", "startingOffsets": "latest"}, "exclude each other"),
    ({"queue": "q", "payloadSchema": "n NOPE"}, "payloadSchema expects columns.*'nope' is no type"),
    ({"queue": "q", "view": "stats", "payloadSchema": "n INT"}, "payloadSchema goes with views that have payloads"),
    ({"queue": "q", "minPartitions": "many"}, "minPartitions expects a whole number"),
    ({"queue": "q", "badJobs": "dlq"}, "badJobs=dlq moves entries"),
    ({"queue": "q", "url": "redis://ana:hush@127.0.0.1:1/0"}, "redis://127.0.0.1:1 cannot be reached"),
    ({"queue": "q", "url": "nonsense:hush"}, "url expects one of redis://"),
    ({"queue": "q", "url": "embedded://"}, "embedded:// would start a server"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_load_refuses(spark: SparkSession, one_url: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException, match=message) as caught:
        spark.read.format("chasqui").options(**{"url": one_url, **options}).load()

    assert "hush" not in str(caught.value)


@pytest.fixture
def with_password(one_url: str, one_client: redis.Redis) -> Iterator[str]:
    """The server's url for a user whose password is hush."""
    one_client.acl_setuser("ana", enabled=True, passwords=["+hush"], commands=["+@all"], keys=["*"])
    yield one_url.replace("redis://", "redis://ana:hush@")
    one_client.acl_deluser("ana")


def test_load_refuses_a_wrong_password_without_telling_it(spark: SparkSession, with_password: str) -> None:
    with pytest.raises(PySparkException, match="refuses the user or password") as caught:
        batch(spark, with_password.replace("hush", "psst"), queue="q")

    assert "psst" not in str(caught.value)


def test_load_refuses_a_key_of_another_type(
    spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis
) -> None:
    one_client.set(Keys(one_queue).stream, "no stream")

    with pytest.raises(PySparkException, match=r":stream on redis://\S+ is a string, and no stream of a queue"):
        batch(spark, one_url, queue=one_queue)


def test_columns_of_the_users_own_are_refused(spark: SparkSession, one_url: str, one_queue: str) -> None:
    with pytest.raises(PySparkException, match="view jobs has its own columns"):
        spark.read.format("chasqui").schema("a int").options(url=one_url, queue=one_queue).load().collect()


def test_plans_do_not_show_the_password(spark: SparkSession, with_password: str, one_queue: str) -> None:
    frame = batch(spark, with_password, queue=one_queue)

    assert frame.collect() == []
    assert "hush" not in frame._jdf.queryExecution().toString()


# --- No side effects ---

READS = {
    "xinfo", "xrange", "xrevrange", "xlen", "xpending", "scan", "get", "pttl", "zcard", "zrangebyscore", "zrange",
    "hget", "hmget", "exists", "time", "evalsha_ro", "eval_ro", "hello", "client", "select", "auth", "ping", "command",
}  # fmt: skip


@contextmanager
def monitored(url: str, mark: str) -> Iterator[set[str]]:
    """The names of all commands that the server gets while the block lasts."""
    seen: set[str] = set()
    # Without a time-out: a server that nobody asks anything tells nothing for as long as Spark takes to start a task.
    with redis.Redis.from_url(url, protocol=2, socket_timeout=None) as client, client.monitor() as monitor:

        def listen() -> None:
            for told in monitor.listen():
                name, *rest = told["command"].split(" ")
                if mark in rest:
                    return
                if told["client_type"] != "lua":
                    seen.add(name.lower())
                else:
                    seen.add(f"lua:{name.lower()}")

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield seen
        client.echo(mark)
        thread.join(10)
        assert not thread.is_alive()


def test_observing_sends_read_commands_only(spark: SparkSession, url: str, queue: str, client: redis.Redis) -> None:
    add(url, queue, *range(50))
    before = client.dump(Keys(queue).stream)
    options: dict[str, Any] = {"queue": queue, "minPartitions": 2}

    with monitored(url, f"end-{queue}") as seen:
        for view in ("jobs", "events", "dlq", "pending", "delayed", "repeatable", "results", "stats"):
            batch(spark, url, **options, view=view).collect()
        batch(spark, url, **options, jobsPerPartition=7).collect()
        query = (
            spark.readStream.format("chasqui").options(url=url, **options, maxJobsPerTrigger=30).load()
            .writeStream.format("noop").trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(60)

    assert "xrange" in seen
    # Redis 6.2 has no EVALSHA_RO; what its scripts call is seen all the same.
    plain = {"eval", "evalsha"} if is_redis_6(client) else set()
    assert {name.removeprefix("lua:") for name in seen} - READS - {"echo"} == plain
    assert client.dump(Keys(queue).stream) == before


def test_offsets_given_as_json_name_queues(spark: SparkSession, one_url: str, numbered: str) -> None:
    options = {"startingOffsets": json.dumps({numbered: "8-0"}), "endingOffsets": json.dumps({numbered: "latest"})}

    assert batch(spark, one_url, queue=numbered, **options).count() == 2
