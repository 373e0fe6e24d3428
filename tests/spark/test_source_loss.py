"""failOnDataLoss: entries that vanish under a query's feet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from chasqui import Producer, embedded
from chasqui.protocol.keys import Keys
from tests.conftest import skip_before_redis_7
from tests.spark.source_tools import Run, add, stream, xadd_at


class Watched:
    """A stream of events 1-0, 2-0... that a query has read up to some place."""

    def __init__(self, spark: SparkSession, client: redis.Redis, url: str, queue: str, checkpoint: Path) -> None:
        self.client, self.key = client, Keys(queue).events
        self.spark, self.url, self.queue, self.checkpoint = spark, url, queue, checkpoint

    def put(self, *places: int) -> None:
        for place in places:
            xadd_at(self.client, self.key, f"{place}-0", e="active")

    def read(self, **options: Any) -> list[str]:
        frame = stream(self.spark, self.url, queue=self.queue, view="events", **options)
        return [row.entry_id for row in Run(frame, self.checkpoint).available_now()]


@pytest.fixture
def watched(spark: SparkSession, client: redis.Redis, url: str, queue: str, tmp_path: Path) -> Watched:
    return Watched(spark, client, url, queue, tmp_path)


def test_trimmed_entries_fail_the_query_or_are_warned_about(watched: Watched) -> None:
    skip_before_redis_7(watched.client, "counters of what was added and deleted")
    watched.put(1, 2, 3)
    assert watched.read() == ["1-0", "2-0", "3-0"]
    watched.put(4, 5, 6, 7)
    watched.client.xtrim(watched.key, maxlen=2, approximate=False)

    with pytest.raises(PySparkException, match="2 entries after 3-0 were trimmed before they were read"):
        watched.read()
    assert watched.read(failOnDataLoss="false") == ["6-0", "7-0"]


def test_trimming_what_was_read_is_no_loss(watched: Watched) -> None:
    watched.put(1, 2, 3)
    watched.read()
    watched.put(4, 5)
    watched.client.xtrim(watched.key, maxlen=2, approximate=False)

    assert watched.read() == ["4-0", "5-0"]


def test_a_limited_query_that_lags_behind_trimming_notices(watched: Watched) -> None:
    skip_before_redis_7(watched.client, "counters of what was added and deleted")
    watched.put(*range(1, 7))
    # An AvailableNow run goes on to its target: a batch that fails half way leaves the query in the middle.
    frame = stream(watched.spark, watched.url, queue=watched.queue, view="events", maxJobsPerTrigger=2)

    def only_one(_: Any, batch_id: int) -> None:
        if batch_id:
            raise RuntimeError("stop here")

    writer = frame.writeStream.foreachBatch(only_one).option("checkpointLocation", str(watched.checkpoint))
    query = writer.trigger(availableNow=True).start()
    with pytest.raises(PySparkException, match="stop here"):
        query.awaitTermination(60)
    watched.client.xtrim(watched.key, maxlen=1, approximate=False)

    with pytest.raises(PySparkException, match="1 entries after 4-0 were trimmed"):
        watched.read(maxJobsPerTrigger=2)


def test_deleted_entries_of_the_dead_letters_are_no_loss(watched: Watched) -> None:
    """Replaying and purging delete entries; that is their end, and not a loss."""
    watched.put(1, 2)
    watched.read()
    watched.put(3, 4, 5)
    watched.client.xdel(watched.key, "3-0", "4-0")

    assert watched.read() == ["5-0"]


def test_a_stream_made_anew_is_noticed(watched: Watched) -> None:
    skip_before_redis_7(watched.client, "counters of what was added and deleted")
    watched.put(1, 2, 3)
    watched.read()
    watched.client.delete(watched.key)
    watched.put(10, 11)

    with pytest.raises(PySparkException, match="it was made anew"):
        watched.read()
    assert watched.read(failOnDataLoss="false") == ["10-0", "11-0"]
    assert watched.read() == []


def test_a_stream_that_lost_its_tail_is_noticed_and_not_read_twice(watched: Watched) -> None:
    watched.put(1, 2)
    copy = watched.client.dump(watched.key)
    watched.put(3)
    watched.read()
    assert copy is not None
    watched.client.restore(watched.key, 0, copy, replace=True)

    with pytest.raises(PySparkException, match="it ends at 2-0, before 3-0, which was read already"):
        watched.read()
    assert watched.read(failOnDataLoss="false") == []
    watched.put(4)
    assert watched.read() == ["4-0"]


def test_a_stream_that_is_gone_is_noticed(watched: Watched) -> None:
    watched.put(1)
    watched.read()
    watched.client.delete(watched.key)

    with pytest.raises(PySparkException, match="its stream is gone"):
        watched.read()
    assert watched.read(failOnDataLoss="false") == []
    watched.put(5)
    assert watched.read(failOnDataLoss="false") == ["5-0"]


def test_a_key_of_another_type_is_noticed(watched: Watched) -> None:
    watched.put(1)
    watched.read()
    frame = stream(watched.spark, watched.url, queue=watched.queue, view="events")
    watched.client.delete(watched.key)
    watched.client.set(watched.key, "x")

    with pytest.raises(PySparkException, match="its key holds another type"):
        Run(frame, watched.checkpoint).available_now()


def test_flushall_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    with embedded.start() as server, redis.Redis.from_url(server.url) as client:
        add(server.url, "mail", 1, 2)
        run = Run(stream(spark, server.url, queue="mail"), tmp_path)
        assert len(run.available_now()) == 2
        client.flushall()

        with pytest.raises(PySparkException, match="its stream is gone"):
            run.available_now()


def test_workers_that_settle_jobs_are_no_loss_but_counted(
    spark: SparkSession, url: str, queue: str, client: redis.Redis, tmp_path: Path
) -> None:
    import json

    skip_before_redis_7(client, "counters of what was added and deleted")
    key = Keys(queue).stream
    run = Run(stream(spark, url, queue=queue), tmp_path)
    with Producer(url, queue=queue) as producer:
        producer.add_bulk([1, 2, 3])
        assert len(run.available_now()) == 3
        producer.add_bulk([4, 5, 6, 7])
    ids = [entry_id for entry_id, _ in client.xrange(key)]
    client.xdel(key, *ids[:-1])

    query = run.start(availableNow=True)
    assert query.awaitTermination(60)

    assert len(run.rows) == 4
    assert json.loads(query.lastProgress.sources[0].latestOffset)["gone"] == 3
