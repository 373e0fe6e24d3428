"""On a Redis cluster, queues on three nodes: rows in exactly once, read as a stream, worked off, dead letters back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 (its usual name)

from chasqui_spark import worker
from tests.engine.test_cluster import Cluster
from tests.spark.sink_tools import add_rows

QUEUES = ["q0", "q1", "q2", "q3", "q4"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, None)


def test_rows_go_the_whole_way_round(spark: SparkSession, cluster: Cluster, tmp_path: Path) -> None:
    assert {cluster.owner(queue) for queue in QUEUES} == {0, 1, 2}
    format_and_url: dict[str, Any] = {"format": "chasqui", "url": cluster.url}

    def held(kind: str) -> list[int]:
        return [cluster.clients[cluster.owner(queue)].xlen(f"{{chasqui:{queue}}}:{kind}") for queue in QUEUES]

    def enqueue() -> None:
        files = spark.readStream.schema("n bigint").parquet(str(tmp_path / "in"))
        rows = files.select(F.format_string("q%d", F.col("n") % 5).alias("queue"), F.struct("n").alias("payload"))
        sink = rows.writeStream.format("chasqui").options(url=cluster.url)
        query = sink.option("checkpointLocation", str(tmp_path / "sink")).trigger(availableNow=True).start()
        assert query.awaitTermination(60)

    def work(handler: Any) -> None:
        query = worker(
            spark,
            url=cluster.url,
            queue_pattern="q*",
            handler=handler,
            checkpoint=str(tmp_path / "worker"),
            trigger={"availableNow": True},
            max_attempts=1,
        )
        assert query.awaitTermination(60)

    for files in (range(100), range(100, 200)):
        add_rows(tmp_path / "in", files)
        enqueue()
    assert held("stream") == [40] * 5

    read = spark.read.load(queuePattern="q*", payloadSchema="n bigint", **format_and_url)
    assert sorted(row.n for row in read.select("payload.n").collect()) == list(range(200))

    def picky(job: Any) -> None:
        if job.payload["n"] < 10:
            raise ValueError("too small")

    work(picky)
    assert (held("stream"), held("dlq")) == ([0] * 5, [2] * 5)

    dead = spark.read.load(queuePattern="q*", view="dlq", **format_and_url)
    dead.write.mode("append").save(replayFrom="dlq", **format_and_url)
    assert (held("stream"), held("dlq")) == ([2] * 5, [0] * 5)

    work(lambda job: None)
    assert (held("stream"), held("dlq")) == ([0] * 5, [0] * 5)
