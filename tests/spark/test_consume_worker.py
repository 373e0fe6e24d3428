"""worker(): handlers on executors, every job settled by itself; the outcome sink; dead letters back by DataFrame."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from chasqui import Backoff, Producer, RetryLater, RetryOverride, Router, UnrecoverableError, batch
from chasqui_spark import arrow_batch, worker
from tests.spark.consume_tools import add, consume, running, waiting
from tests.support import eventually

NOW = {"availableNow": True}


def drain(spark: SparkSession, url: str, queue: str, handler: Any, home: Path, **options: Any) -> None:
    query = worker(spark, url=url, queue=queue, handler=handler, checkpoint=str(home), trigger=NOW, **options)
    assert query.awaitTermination(120)


def letters(client: redis.Redis, queue: str) -> dict[str, str]:
    """Reason by name of the job."""
    found = client.xrange(f"{{chasqui:{queue}}}:dlq")
    return {fields.get(b"n", b"").decode(): fields[b"reason"].decode() for _, fields in found}


def events(client: redis.Redis, queue: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for _, fields in client.xrange(f"{{chasqui:{queue}}}:events"):
        found.setdefault(fields[b"id"].decode(), []).append(fields[b"e"].decode())
    return found


def test_a_router_of_handlers_settles_every_job_as_a_worker_would(
    spark: SparkSession, url: str, client: redis.Redis, queue: str, tmp_path: Path
) -> None:
    def fine(job: Any) -> Any:
        return {"twice": job.payload * 2, "run": job.attempt + 1}

    def never(job: Any) -> None:
        raise UnrecoverableError("never")

    def later(job: Any) -> None:
        raise RetryLater(60_000)

    def wrong(job: Any) -> None:
        raise ValueError("wrong")

    router = Router().on("fine", fine).on("never", never).on("later", later).on("wrong", wrong)
    with Producer(url, queue=queue) as producer:
        for name in ("fine", "never", "later", "wrong"):
            producer.add(
                21, id=name, name=name, retry=RetryOverride(1 if name == "wrong" else 3, Backoff.fixed(50_000))
            )
        producer.add(1, id="unknown", name="unknown")

        drain(spark, url, queue, router, tmp_path, store_results=True, unknown_name="dlq", run_promoter=False)

        assert producer.get_result("fine") == {"twice": 42, "run": 1}
    assert letters(client, queue) == {
        "never": "unrecoverable",
        "wrong": "retries_exhausted",
        "unknown": "unrecoverable",
    }
    assert client.zcard(f"{{chasqui:{queue}}}:delayed") == 1
    assert waiting(client, queue) == 0
    told = events(client, queue)
    assert told["fine"] == ["active", "completed"]
    assert told["later"] == ["active", "failed", "retry-scheduled"]
    assert told["wrong"] == ["active", "failed", "dlq"]


def test_batch_arrow_and_coroutine_handlers_answer_for_each_job(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    @batch(max_jobs=3)
    def lists(jobs: list[Any]) -> list[Any]:
        return [ValueError("odd") if job.payload % 2 else job.payload for job in jobs]

    @arrow_batch(max_jobs=4)
    def tables(table: Any) -> list[Any]:
        names = table.column("name").to_pylist()
        return [UnrecoverableError("last") if name == "last" else 1 for name in names]

    async def coroutine(job: Any) -> int:
        import asyncio

        await asyncio.sleep(0.01)
        return int(job.payload)

    options = {"store_results": True, "max_attempts": 1, "run_scheduler": False}
    add(one_url, one_queue, 10)
    drain(spark, one_url, one_queue, lists, tmp_path, **options)
    assert one_client.xlen(f"{{chasqui:{one_queue}}}:dlq") == 5
    add(one_url, one_queue, 5)
    add(one_url, one_queue, 1, name="last")
    drain(spark, one_url, one_queue, tables, tmp_path, **options)
    assert letters(one_client, one_queue)["last"] == "unrecoverable"
    add(one_url, one_queue, 5)
    drain(spark, one_url, one_queue, coroutine, tmp_path, **options)

    results = list(one_client.scan_iter(match=f"{{chasqui:{one_queue}}}:result:*", count=1000))
    assert len(results) == 5 + 5 + 5
    assert waiting(one_client, one_queue) == 0


def test_retries_and_repeats_go_on_with_spark_alone(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    def second_time_lucky(job: Any) -> int:
        if job.attempt < 1:
            raise ValueError("not yet")
        return int(job.attempt)

    with Producer(one_url, queue=one_queue) as producer:
        producer.add(1, id="j", retry=RetryOverride(3, Backoff.fixed(10)))
        query = worker(
            spark,
            url=one_url,
            queue=one_queue,
            handler=second_time_lucky,
            checkpoint=str(tmp_path),
            store_results=True,
        )
        with running(query):
            assert eventually(lambda: producer.get_result("j"), within=60) == 1


def test_a_job_that_kills_its_python_worker_ends_in_the_dead_letters_and_its_neighbours_are_done(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    def poisonous(job: Any) -> int:
        if job.name == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    with Producer(one_url, queue=one_queue) as producer:
        for number in range(6):
            producer.add(number, name="poison" if number == 3 else "fine")

    deadline = time.monotonic() + 150
    while waiting(one_client, one_queue) and time.monotonic() < deadline:
        query = worker(
            spark,
            url=one_url,
            queue=one_queue,
            handler=poisonous,
            checkpoint=str(tmp_path),
            trigger=NOW,
            max_batch_runs=1,
            run_promoter=False,
            run_scheduler=False,
        )
        with contextlib.suppress(Exception):  # the query fails each time that the poison is read
            query.awaitTermination(60)

    assert waiting(one_client, one_queue) == 0
    assert letters(one_client, one_queue) == {"poison": "retries_exhausted"}
    assert one_client.xlen(f"{{chasqui:{one_queue}}}:dlq") == 1


def test_the_outcome_sink_settles_rows_and_leftovers_are_a_failed_run(
    spark: SparkSession, url: str, client: redis.Redis, queue: str, tmp_path: Path
) -> None:
    with Producer(url, queue=queue) as producer:
        for name in ("ok", "retry", "fail", "silent"):
            producer.add({"n": name}, id=name, name=name)
    jobs = consume(spark, url, queue, ack="settle")
    told = jobs.where("name != 'silent'").selectExpr(
        "queue",
        "entry_id",
        "name as outcome",
        "'because' as error",
        "60000L as delay_ms",
        "named_struct('a', 1) as result",
    )
    query = (
        told.writeStream.format("chasqui")
        .options(url=url, settle="true", storeResults="true", checkpointLocation=str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)

    with Producer(url, queue=queue) as producer:
        assert producer.get_result("ok") == {"a": 1}
    assert letters(client, queue) == {"fail": "unrecoverable"}
    delayed = client.zrange(f"{{chasqui:{queue}}}:delayed", 0, -1)
    assert sorted(name in member for member in delayed for name in (b"retry", b"silent")) == [False, False, True, True]
    assert waiting(client, queue) == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["queue", "entry_id"], "need a column outcome"),
        (["queue", "entry_id", "name as outcome", "attempt as tries"], "unknown column 'tries'"),
        (["queue", "entry_id", "attempt as outcome"], "column outcome expects string"),
        (["queue", "entry_id", "'done' as outcome"], "expects one of ok, retry, fail; got 'done'"),
    ],
)
def test_outcomes_that_cannot_be_meant_are_refused(
    spark: SparkSession, one_url: str, one_queue: str, columns: list[str], message: str
) -> None:
    add(one_url, one_queue, 1)
    jobs = spark.read.format("chasqui").options(url=one_url, queue=one_queue).load()

    with pytest.raises(Exception, match=message):
        jobs.selectExpr(*columns).write.format("chasqui").options(url=one_url, settle="true").mode("append").save()


def test_dead_letters_go_back_repaired_once_and_at_the_chosen_pace(
    spark: SparkSession, url: str, client: redis.Redis, queue: str, tmp_path: Path
) -> None:
    with Producer(url, queue=queue) as producer:
        for number in range(40):
            producer.add({"n": number, "to": "nobody"}, id=f"j{number}", name="mail")
        query = worker(
            spark,
            url=url,
            queue=queue,
            handler=_refuse,
            checkpoint=str(tmp_path),
            trigger=NOW,
            run_promoter=False,
            run_scheduler=False,
        )
        assert query.awaitTermination(120)
        dead = (
            spark.read.format("chasqui")
            .options(url=url, queue=queue, view="dlq", payloadSchema="n INT, to STRING")
            .load()
            .where("payload.n >= 10")
        )
        mended = dead.withColumn("payload", f.col("payload").withField("to", f.lit("ana"))).localCheckpoint()
        start = time.monotonic()

        for _ in range(2):
            put = mended.write.format("chasqui").options(url=url, replayFrom="dlq", maxPerSecond="20")
            put.mode("append").save()

        assert time.monotonic() - start > 1.2
        assert (waiting(client, queue), client.xlen(f"{{chasqui:{queue}}}:dlq")) == (30, 10)
        seen: list[Any] = (
            spark.read.format("chasqui")
            .options(url=url, queue=queue, payloadSchema="n INT, to STRING")
            .load()
            .select("payload.to", "attempt", "name")
            .distinct()
            .collect()
        )
        assert [tuple(row) for row in seen] == [("ana", 0, "mail")]


def _refuse(job: Any) -> None:
    raise UnrecoverableError("no such address")
