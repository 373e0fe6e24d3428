"""Batches into queues: columns, constants, numbered writes, rows that cannot become jobs, full queues, routing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack
import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from chasqui import Backoff, Producer, RetryOverride, embedded
from chasqui.protocol.keys import Keys
from tests.engine.seen import in_delayed, in_stream, keys_of
from tests.proxy import DROP_REPLY, Proxy


@pytest.fixture
def write(one_url: str, one_queue: str) -> Any:
    """Writes a DataFrame to the test's queue with those options."""

    def save(rows: DataFrame, **options: Any) -> None:
        writer = rows.write.format("chasqui").mode(options.pop("mode", "append"))
        given = {"url": one_url, "queue": one_queue, **options}
        for name, value in given.items():
            if value is not None:
                writer = writer.option(name, value)
        writer.save()

    return save


def numbers(client: redis.Redis, queue: str) -> Counter[int]:
    return Counter(job.payload["n"] for job in in_stream(client, queue))


# --- Rows and columns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbered", [False, True], ids=["at-least-once", "exactly-once"])
def test_rows_become_jobs_with_all_that_columns_say(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any, numbered: bool
) -> None:
    rows = spark.sql(
        """select * from values
        ('a', 1L, 'first', 0L, 7, 'exponential', 100L, 3.0D),
        (null, 2L, null, 3600000L, null, null, null, null)
        as t(id, n, name, delay_ms, max_attempts, backoff_kind, backoff_delay_ms, backoff_multiplier)"""
    )
    write(rows, name="other", **({"txnAppId": one_queue, "txnVersion": 1} if numbered else {}))

    [now], [later] = in_stream(one_client, one_queue), in_delayed(one_client, one_queue)

    assert (now.id, now.name, now.payload, now.attempt) == ("a", "first", {"n": 1}, 0)
    assert now.retry == RetryOverride(7, Backoff.exponential(100, multiplier=3.0))
    assert (later.name, later.payload, later.retry) == ("other", {"n": 2}, None)
    assert later.at == later.created_at_ms + 3_600_000
    assert one_client.exists(Keys(one_queue).dedup("a"))


def test_a_payload_column_is_the_payload(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any
) -> None:
    write(
        spark.sql(
            "select named_struct('n', 1, 'l', array(1.5D), 'm', map('k', timestamp'2026-11-18 10:00:00')) payload"
        )
    )
    write(spark.sql("select cast(X'93010203' as binary) payload"))
    write(spark.sql("select 'text' as payload"))

    first, second, third = (job.payload for job in in_stream(one_client, one_queue))
    assert (first["n"], first["l"], second, third) == (1, [1.5], [1, 2, 3], "text")
    assert first["m"]["k"].isoformat() == "2026-11-18T10:00:00+00:00"


def test_options_give_what_columns_leave_out(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any
) -> None:
    constants = {"maxAttempts": 4, "backoffKind": "fixed", "backoffDelayMs": 9, "delayMs": "1h", "name": "x"}
    write(spark.sql("select 1 n"), **constants)

    [job] = in_delayed(one_client, one_queue)
    assert job.retry == RetryOverride(4, Backoff.fixed(9))
    assert job.name == "x"


def test_the_bytes_in_the_queue_are_those_of_the_producer(
    spark: SparkSession, one_client: redis.Redis, one_url: str, one_queue: str, write: Any
) -> None:
    value = {"s": "käse", "i": -5, "f": 0.25, "b": True, "none": None, "raw": b"\x00\xff", "list": ["a", None]}
    write(
        spark.sql("select 'käse' s, -5 i, 0.25D f, true b, null none, X'00ff' raw, array('a', null) list"),
        name="w",
        txnAppId=one_queue,
        txnVersion=0,
    )
    with Producer(one_url, queue=one_queue) as producer:
        producer.add(value, name="w")

    (_, ours), (_, theirs) = one_client.xrange(Keys(one_queue).stream)

    assert ours.keys() == theirs.keys()
    assert ours[b"n"] == theirs[b"n"]
    mine, other = msgpack.unpackb(ours[b"d"]), msgpack.unpackb(theirs[b"d"])
    assert mine[1] == other[1]
    assert len(ours[b"d"]) == len(theirs[b"d"])
    assert (len(mine), mine[3]) == (len(other), other[3])


def test_rows_are_routed_by_column_and_the_option_wins(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any
) -> None:
    rows = spark.range(0, 300, 1, 3).selectExpr(f"concat('{one_queue}-', id % 3) as queue", "id as n")
    write(rows, queue=None, txnAppId=one_queue, txnVersion=1)
    write(rows)

    for way in range(3):
        assert numbers(one_client, f"{one_queue}-{way}") == Counter(range(way, 300, 3))
    assert numbers(one_client, one_queue) == Counter(range(300))


# --- Numbered writes -----------------------------------------------------------------------------------------------


def test_a_numbered_batch_written_twice_is_there_once_and_an_older_one_is_skipped(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any
) -> None:
    rows = spark.range(0, 2500, 1, 2).selectExpr("id as n")
    write(rows, txnAppId=one_queue, txnVersion=5)
    write(rows, txnAppId=one_queue, txnVersion=5)
    write(rows, txnAppId=one_queue, txnVersion=4)

    assert numbers(one_client, one_queue) == Counter(range(2500))
    with pytest.raises(PySparkException, match="CMQ-305"):
        write(rows, txnAppId=one_queue, txnVersion=4, txnOlder="fail")
    write(rows, txnAppId=one_queue, txnVersion=6)
    assert sum(numbers(one_client, one_queue).values()) == 5000
    assert not [key for key in keys_of(one_client, one_queue) if ":stage:" in key]


def test_plain_batches_have_no_ledger(spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any) -> None:
    write(spark.range(10).selectExpr("id as n"))
    write(spark.range(10).selectExpr("id as n"))

    assert sum(numbers(one_client, one_queue).values()) == 20
    assert keys_of(one_client, one_queue) == [Keys(one_queue).stream]


def test_at_least_once_loses_nothing_with_a_lost_reply(
    spark: SparkSession, one_client: redis.Redis, one_server: embedded.EmbeddedServer, one_queue: str, write: Any
) -> None:
    assert one_server.port is not None
    with Proxy(one_server.port) as proxy:
        proxy.on("XADD", nth=700, act=DROP_REPLY)
        write(spark.range(0, 3000, 1, 1).selectExpr("id as n"), url=proxy.url)

    assert set(numbers(one_client, one_queue)) == set(range(3000))


# --- Refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "overwrite"}, "a queue is appended to: use append"),
        ({"delivery": "exactlyOnce"}, "give txnAppId and txnVersion"),
        ({"txnAppId": "x"}, "give txnAppId and txnVersion"),
        ({"txnVersion": 1}, "txnVersion is counted per txnAppId"),
        ({"queue": None}, "set the option queue, or have a column queue"),
        ({"backoffKind": "fixed"}, "backoffKind and backoffDelayMs go together"),
        ({"url": "embedded://"}, "would start a server in every planning process"),
        ({"url": "http://secret:word@x/"}, "url expects"),
    ],
)
def test_wrong_options_stop_the_write(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PySparkException, match=message) as refused:
        write(spark.range(3).selectExpr("id as n"), **options)

    assert "secret" not in str(refused.value)
    assert keys_of(one_client, one_queue) == []


def test_bad_rows_fail_the_batch_before_anything_is_enqueued(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any
) -> None:
    rows = spark.range(0, 3000, 1, 1).selectExpr("id as n", "if(id = 2222, repeat('x', 300), 'ok') as name")

    with pytest.raises(PySparkException, match=r"partition 0, row 2222, column name: name takes at most 256 bytes"):
        write(rows, txnAppId=one_queue, txnVersion=1)

    assert keys_of(one_client, one_queue) == []


@pytest.mark.parametrize("numbered", [False, True], ids=["at-least-once", "exactly-once"])
@pytest.mark.parametrize("how", ["dlq", "drop"])
def test_bad_rows_are_set_aside_or_dropped_and_the_others_written(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any, how: str, numbered: bool
) -> None:
    rows = spark.range(0, 100, 1, 2).selectExpr("id as n", "if(id % 10 = 0, repeat('x', 300), 'ok') as name")
    write(rows, badRows=how, **({"txnAppId": one_queue, "txnVersion": 1} if numbered else {}))

    assert numbers(one_client, one_queue) == Counter(n for n in range(100) if n % 10)
    letters = one_client.xrange(Keys(one_queue).dlq)
    assert len(letters) == (10 if how == "dlq" else 0)
    for _, letter in letters:
        assert letter[b"reason"] == b"malformed"
        assert letter[b"detail"].startswith(b"name: name takes at most 256 bytes")
        assert msgpack.unpackb(msgpack.unpackb(letter[b"d"])[1])["n"] % 10 == 0


# --- At the cap ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbered", [False, True], ids=["at-least-once", "exactly-once"])
def test_a_full_queue_is_refused_after_its_time(
    spark: SparkSession, one_client: redis.Redis, one_queue: str, write: Any, numbered: bool
) -> None:
    rows = spark.range(0, 3000, 1, 1).selectExpr("id as n")
    given = {"txnAppId": one_queue, "txnVersion": 1} if numbered else {}

    with pytest.raises(PySparkException, match=r"CMQ-301.*after 100 ms of waiting"):
        write(rows, maxStreamLen=1000, blockTimeout="100ms", **given)

    assert 900 <= one_client.xlen(Keys(one_queue).stream) <= 2000
    if numbered:
        one_client.delete(Keys(one_queue).stream)
        write(rows, **given)
        assert one_client.xlen(Keys(one_queue).stream) == 3000 - 900
