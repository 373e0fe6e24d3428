"""Reading queues in tests: a batch, or a stream that is driven to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import redis
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

from chasqui import Producer


def batch(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    return spark.read.format("chasqui").options(url=url, **options).load()


def stream(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    return spark.readStream.format("chasqui").options(url=url, **options).load()


def add(url: str, queue: str, *payloads: Any) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(list(payloads))


class Run:
    """A stream with a checkpoint of its own. ``batches`` holds the rows of each batch that brought some."""

    def __init__(self, frame: DataFrame, checkpoint: Path) -> None:
        self.frame, self.checkpoint = frame, checkpoint
        self.batches: list[list[Row]] = []
        self.partitions: list[int] = []

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.batches for row in rows]

    def start(self, **trigger: Any) -> StreamingQuery:
        def keep(frame: DataFrame, _: int) -> None:
            self.partitions.append(frame.rdd.getNumPartitions())
            rows = frame.collect()
            if rows:
                self.batches.append(rows)

        writer = self.frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    def available_now(self) -> list[Row]:
        """Read what is there; gives the rows of this run."""
        before = len(self.rows)
        query = self.start(availableNow=True)
        try:
            assert query.awaitTermination(60), "the query did not end"
        finally:
            query.stop()
        return self.rows[before:]


def logged_offsets(checkpoint: Path) -> list[Any]:
    """The end offsets of all batches in the log."""
    logs = sorted((p for p in (checkpoint / "offsets").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    return [json.loads(p.read_text().splitlines()[2]) for p in logs]


def xadd_at(client: redis.Redis, key: str, entry_id: str, **fields: Any) -> None:
    client.execute_command("XADD", key, entry_id, *[x for pair in (fields or {"d": "x"}).items() for x in pair])
