"""Streams into queues: restarts, failures, checkpoints that were tampered with, several sinks at a time."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from chasqui import OptionError, RetryOverride, embedded
from chasqui.protocol.keys import Keys
from chasqui_spark import ChasquiSink
from tests.engine.seen import in_delayed, in_stream, keys_of
from tests.proxy import DROP_REPLY, Proxy, call
from tests.spark.sink_tools import add_rows


class Stream:
    """A folder, a checkpoint and a queue; ``run`` writes what is new in the folder, as a query that is started anew."""

    def __init__(self, spark: SparkSession, url: str, queue: str, home: Path) -> None:
        self.spark, self.url, self.queue = spark, url, queue
        self.folder, self.checkpoint = home / "in", home / "checkpoint"

    def run(self, url: str | None = None, rows: Any = None, checkpoint: Path | None = None, **options: Any) -> str:
        """Returns the query's id."""
        source = self.spark.readStream.schema("n long").parquet(str(self.folder))
        writer = (rows(source) if rows else source).writeStream.format("chasqui").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(checkpoint or self.checkpoint)).option("url", url or self.url)
        given = {"queue": self.queue, **options}
        for name, value in given.items():
            if value is not None:
                writer = writer.option(name, value)
        query = writer.start()
        query.awaitTermination(60)
        return str(query.id)

    def for_each(self, function: Any) -> str:
        source = self.spark.readStream.schema("n long").parquet(str(self.folder))
        writer = source.writeStream.foreachBatch(function).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.checkpoint)).start()
        query.awaitTermination(60)
        return str(query.id)

    def forget_last_commit(self) -> None:
        last = max((p for p in (self.checkpoint / "commits").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        last.unlink()
        (last.parent / f".{last.name}.crc").unlink(missing_ok=True)


@pytest.fixture
def stream(spark: SparkSession, one_url: str, one_queue: str, tmp_path: Path) -> Stream:
    made = Stream(spark, one_url, one_queue, tmp_path)
    add_rows(made.folder, range(100))
    return made


def numbers(client: redis.Redis, queue: str) -> Counter[int]:
    return Counter(job.payload["n"] for job in in_stream(client, queue))


def ledgers(client: redis.Redis, queue: str) -> list[str]:
    return [key for key in keys_of(client, queue) if ":txn:" in key]


# --- Restarts ------------------------------------------------------------------------------------------------------


def test_each_batch_is_written_once_and_the_writer_is_the_query(stream: Stream, one_client: redis.Redis) -> None:
    first = stream.run()
    add_rows(stream.folder, range(100, 200))
    second = stream.run()

    assert first == second
    assert numbers(one_client, stream.queue) == Counter(range(200))
    assert ledgers(one_client, stream.queue) == [Keys(stream.queue).ledger(first)]
    assert one_client.hget(f"{{chasqui-txn:{first}}}:txn", "done") == b"1"


def test_a_batch_whose_commit_file_is_lost_is_not_written_again(stream: Stream, one_client: redis.Redis) -> None:
    stream.run()
    add_rows(stream.folder, range(100, 200))
    stream.run()
    stream.forget_last_commit()

    stream.run()

    assert numbers(one_client, stream.queue) == Counter(range(200))
    assert not [key for key in keys_of(one_client, stream.queue) if ":stage:" in key]


def test_a_full_queue_fails_the_query_and_the_next_run_completes_the_batch(
    stream: Stream, one_client: redis.Redis
) -> None:
    with pytest.raises(StreamingQueryException, match=r"CMQ-301.*54 of 100 rows are published"):
        stream.run(overflow="reject", maxStreamLen=60)
    first = numbers(one_client, stream.queue)
    one_client.delete(Keys(stream.queue).stream)

    stream.run(overflow="reject", maxStreamLen=60)

    assert first + numbers(one_client, stream.queue) == Counter(range(100))


def test_a_connection_lost_in_the_middle_of_a_reply_changes_nothing(
    stream: Stream, one_server: embedded.EmbeddedServer, one_client: redis.Redis
) -> None:
    assert one_server.port is not None
    with Proxy(one_server.port) as proxy:
        for nth in (1, 3, 4):
            proxy.on("EVALSHA", nth=nth, act=DROP_REPLY)
        proxy.on("EXEC", nth=1, act=DROP_REPLY)
        stream.run(url=proxy.url)
        assert proxy.counts["EVALSHA"] > 4

    assert numbers(one_client, stream.queue) == Counter(range(100))


def test_a_server_that_stays_away_fails_the_query_and_the_next_run_completes_the_batch(
    stream: Stream, one_server: embedded.EmbeddedServer, one_client: redis.Redis
) -> None:
    assert one_server.port is not None
    with Proxy(one_server.port) as proxy:

        def gone() -> None:
            proxy.refuse()
            proxy.drop_all()

        proxy.on("EVALSHA", nth=4, act=call(gone))
        with pytest.raises(StreamingQueryException, match="CMQ-001"):
            stream.run(url=proxy.url, reconnectAttempts=1)

    stream.run()

    assert numbers(one_client, stream.queue) == Counter(range(100))


def test_a_stage_that_expired_fails_the_batch_and_the_next_run_is_whole(
    stream: Stream, one_server: embedded.EmbeddedServer, one_client: redis.Redis
) -> None:
    assert one_server.port is not None

    def expire() -> None:
        stages = [key for key in keys_of(one_client, stream.queue) if ":stage:" in key]
        assert stages
        one_client.delete(stages[0])

    with Proxy(one_server.port) as proxy:
        proxy.on("EVALSHA", nth=1, act=call(expire))
        with pytest.raises(StreamingQueryException, match=r"CMQ-304.*run it again"):
            stream.run(url=proxy.url)
    assert not one_client.exists(Keys(stream.queue).stream)

    stream.run()

    assert numbers(one_client, stream.queue) == Counter(range(100))


def test_rows_routed_elsewhere_in_the_re_run_of_a_half_published_batch_are_there_once(
    stream: Stream, one_client: redis.Redis
) -> None:
    def routed(way: str) -> Any:
        column = f"concat('{stream.queue}-', {way})"
        return lambda source: source.withColumn("queue", f.expr(column))

    with pytest.raises(StreamingQueryException, match="CMQ-301"):
        stream.run(rows=routed("n % 3"), queue=None, overflow="reject", maxStreamLen=20)
    queues = [f"{stream.queue}-{way}" for way in range(5)]
    first = sum((numbers(one_client, queue) for queue in queues), Counter())
    assert 0 < sum(first.values()) < 100
    one_client.delete(*(Keys(queue).stream for queue in queues))

    stream.run(rows=routed("(n + 1) % 5"), queue=None)

    assert first + sum((numbers(one_client, queue) for queue in queues), Counter()) == Counter(range(100))


# --- Checkpoints ---------------------------------------------------------------------------------------------------


def test_a_deleted_checkpoint_of_a_named_writer_is_an_error_and_drops_nothing(
    stream: Stream, one_client: redis.Redis
) -> None:
    stream.run(txnAppId=stream.queue)
    add_rows(stream.folder, range(1000, 1010))
    before = numbers(one_client, stream.queue)
    shutil.rmtree(stream.checkpoint)

    with pytest.raises(StreamingQueryException, match=r"CMQ-305.*txnAppId"):
        stream.run(txnAppId=stream.queue)

    assert numbers(one_client, stream.queue) == before


def test_a_restored_checkpoint_is_an_error_and_drops_nothing(
    stream: Stream, one_client: redis.Redis, tmp_path: Path
) -> None:
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "backup")
    for start in (100, 200):
        add_rows(stream.folder, range(start, start + 100))
        stream.run()
    add_rows(stream.folder, range(300, 400))

    # The old offsets say batch 1 is next, and the ledger is at 2: what was read meanwhile cannot be told apart.
    with pytest.raises(StreamingQueryException, match="CMQ-305"):
        stream.run(checkpoint=tmp_path / "backup")

    assert numbers(one_client, stream.queue) == Counter(range(300))
    stream.run()
    assert numbers(one_client, stream.queue) == Counter(range(400))


def test_of_two_queries_with_copies_of_one_checkpoint_the_one_behind_stops(
    stream: Stream, one_client: redis.Redis, tmp_path: Path
) -> None:
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "copy")
    for start in (100, 200):
        add_rows(stream.folder, range(start, start + 100))
        stream.run(checkpoint=tmp_path / "copy")

    with pytest.raises(StreamingQueryException, match="CMQ-305"):
        stream.run()

    assert numbers(one_client, stream.queue) == Counter(range(300))


# --- Several at a time ---------------------------------------------------------------------------------------------


def test_two_queries_may_write_one_queue(stream: Stream, one_client: redis.Redis, tmp_path: Path) -> None:
    first = stream.run()
    second = stream.run(checkpoint=tmp_path / "second")

    assert first != second
    assert numbers(one_client, stream.queue) == Counter([*range(100), *range(100)])


def test_two_sinks_of_one_foreach_batch_each_write_once(stream: Stream, one_client: redis.Redis) -> None:
    even = ChasquiSink(queue=f"{stream.queue}-a", sink_id="even", url=stream.url, name="e")
    odd = ChasquiSink(queue=f"{stream.queue}-b", sink_id="odd", url=stream.url, retry=RetryOverride(7))

    def both(batch: DataFrame, batch_id: int) -> None:
        even(batch.where("n % 2 = 0"), batch_id)
        odd(batch.where("n % 2 = 1"), batch_id)

    query = stream.for_each(both)
    stream.forget_last_commit()
    stream.for_each(both)

    assert numbers(one_client, f"{stream.queue}-a") == Counter(range(0, 100, 2))
    assert numbers(one_client, f"{stream.queue}-b") == Counter(range(1, 100, 2))
    assert {job.name for job in in_stream(one_client, f"{stream.queue}-a")} == {"e"}
    assert {job.retry for job in in_stream(one_client, f"{stream.queue}-b")} == {RetryOverride(7)}
    assert ledgers(one_client, f"{stream.queue}-a") == [Keys(f"{stream.queue}-a").ledger(f"{query}/even")]


def test_a_second_sink_of_one_name_is_refused_and_its_rows_are_not_dropped_silently(
    stream: Stream, one_client: redis.Redis
) -> None:
    first = ChasquiSink(queue=f"{stream.queue}-a", url=stream.url)
    second = ChasquiSink(queue=f"{stream.queue}-b", url=stream.url)

    def both(batch: DataFrame, batch_id: int) -> None:
        first(batch, batch_id)
        second(batch, batch_id)

    with pytest.raises(StreamingQueryException, match="sink_id of its own"):
        stream.for_each(both)

    assert len(in_stream(one_client, f"{stream.queue}-a")) == 100
    stream.for_each(first)  # the run after it may write the batch again
    assert len(in_stream(one_client, f"{stream.queue}-a")) == 100


def test_a_failure_between_two_sinks_writes_neither_twice(stream: Stream, one_client: redis.Redis) -> None:
    sinks = [ChasquiSink(queue=f"{stream.queue}-{s}", sink_id=s, url=stream.url) for s in ("a", "b")]
    broken = True

    def both(batch: DataFrame, batch_id: int) -> None:
        sinks[0](batch, batch_id)
        if broken:
            raise ZeroDivisionError("between the two")
        sinks[1](batch, batch_id)

    with pytest.raises(StreamingQueryException, match="between the two"):
        stream.for_each(both)
    broken = False
    stream.for_each(both)

    assert numbers(one_client, f"{stream.queue}-a") == Counter(range(100))
    assert numbers(one_client, f"{stream.queue}-b") == Counter(range(100))


def test_two_plain_writes_of_one_foreach_batch_are_both_written(stream: Stream, one_client: redis.Redis) -> None:
    def both(batch: DataFrame, batch_id: int) -> None:
        for n in (0, 1):
            writer = batch.where(f"n % 2 = {n}").write.format("chasqui").mode("append")
            writer.option("url", stream.url).option("queue", stream.queue).save()

    stream.for_each(both)

    assert numbers(one_client, stream.queue) == Counter(range(100))


def test_a_sink_with_a_name_of_its_own_counts_under_that(stream: Stream, one_client: redis.Redis) -> None:
    stream.for_each(ChasquiSink(queue=stream.queue, url=stream.url, txn_app_id="mine"))

    assert ledgers(one_client, stream.queue) == [Keys(stream.queue).ledger("mine/main")]
    one_client.delete(*one_client.scan_iter(match="{chasqui-txn:mine/main}*"))


# --- Options -------------------------------------------------------------------------------------------------------


def test_at_least_once_needs_no_ledger(stream: Stream, one_client: redis.Redis) -> None:
    stream.run(delivery="atLeastOnce", name="w")

    assert numbers(one_client, stream.queue) == Counter(range(100))
    assert ledgers(one_client, stream.queue) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"txnVersion": 1, "txnAppId": "x"}, "a stream's are numbered by Spark"),
        ({"queue": None}, "set the option queue, or have a column queue"),
        ({"overflw": "block"}, "did you mean overflow"),
        ({"badRows": "ignore"}, "badRows expects one of fail, dlq, drop, got 'ignore'"),
        ({"queue": "{x}"}, "queue expects a name without braces"),
    ],
)
def test_wrong_options_stop_the_stream_before_a_row_is_staged(
    stream: Stream, one_client: redis.Redis, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(StreamingQueryException, match=message):
        stream.run(**options)

    assert keys_of(one_client, stream.queue) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sink_id": ""}, "sink_id expects a name"),
        ({"txn_version": 3}, "set by ChasquiSink"),
        ({"delivery": "atLeastOnce"}, "exactly once"),
        ({"queue": "a", "nmae": "x"}, "did you mean name"),
    ],
)
def test_a_sink_is_checked_where_it_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, ValueError), match=message):
        ChasquiSink(**given)


def test_delayed_rows_and_ids_are_part_of_the_transaction(stream: Stream, one_client: redis.Redis) -> None:
    rows = lambda source: source.selectExpr(  # noqa: E731
        "n", "concat('id-', n % 50) as id", "if(n % 50 < 10, 3600000L, 0L) as delay_ms"
    )
    stream.run(rows=rows)
    stream.forget_last_commit()
    stream.run(rows=rows)

    now, later = in_stream(one_client, stream.queue), in_delayed(one_client, stream.queue)
    assert Counter(job.id for job in [*now, *later]) == Counter(f"id-{n}" for n in range(50))
    assert len(later) == 10
