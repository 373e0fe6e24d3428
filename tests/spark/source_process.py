"""A program of its own that reads a queue: over Spark Connect, on a cluster of processes, or until it is killed.

    source_process.py connect|cluster|run|hang URL QUEUE CHECKPOINT

The last line that it prints is JSON. ``hang`` prints ``{"batch": n}`` inside its first batch and waits there for ever.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from pyspark.sql import DataFrame, SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.log.level": "ERROR",
}


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def main(what: str, url: str, queue: str, checkpoint: str) -> None:
    builder = SparkSession.builder
    if what == "connect":
        builder = builder.remote("local[2]")
    else:
        builder = builder.master("local-cluster[2,1,1024]" if what == "cluster" else "local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    options = {"url": url, "queue": queue, "payloadSchema": "n INT"}
    if what in ("run", "hang"):
        stream(spark, options | {"startingOffsets": "latest"}, checkpoint, hang=what == "hang")
        return
    rows = spark.read.format("chasqui").options(**options, minPartitions="4").load().select("payload.n").collect()
    query = (
        spark.readStream.format("chasqui")
        .options(**options, maxJobsPerTrigger="15", minPartitions="2")
        .load()
        .selectExpr("payload.n AS n")
        .writeStream.format("memory")
        .queryName("read")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    streamed = spark.table("read").collect()
    progress = query.lastProgress
    figures = progress["sources"][0]["latestOffset"] if progress else None
    say(batch=sorted(r.n for r in rows), stream=sorted(r.n for r in streamed), figures=figures)
    spark.stop()


def stream(spark: SparkSession, options: dict[str, str], checkpoint: str, *, hang: bool) -> None:
    seen: list[int] = []

    def take(frame: DataFrame, batch_id: int) -> None:
        if hang:
            say(batch=batch_id)
            threading.Event().wait()
        seen.extend(row.payload.n for row in frame.collect())

    reading = spark.readStream.format("chasqui").options(**options).load()
    query = (
        reading.writeStream.foreachBatch(take)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(90)
    say(seen=sorted(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
