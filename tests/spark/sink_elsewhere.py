"""The sink in other deployments, in a Spark of its own: ``python sink_elsewhere.py <deployment> '<json>'``.

``retries``: tasks fail after some rows and are run again, in another order. ``local-cluster``: executors in processes
of their own. ``connect``: a Spark Connect server, and a client that has nothing but its protocol.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

ROWS = 3000


def session(deployment: str) -> SparkSession:
    builder: Any = SparkSession.builder
    if deployment == "connect":
        builder = builder.remote("local[2]")
    else:
        master = {"retries": "local[2,4]", "local-cluster": "local-cluster[2,1,1024]"}[deployment]
        builder = builder.master(master).config("spark.driver.host", "127.0.0.1")
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.memory", "1g")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.executor.memory": "600m",
        "spark.speculation": "true",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
    }.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def stumbling(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The first attempt of each task fails after 400 rows; the next ones give the rows in another order."""
    from pyspark import TaskContext

    context = TaskContext.get()
    rows = list(batches)
    if context is not None and context.attemptNumber() == 0:
        yield from rows[:2]
        raise RuntimeError("this attempt was told to fail")
    yield from reversed(rows)


def numbered(rows: DataFrame, about: dict[str, Any], version: int) -> None:
    writer = rows.write.format("chasqui").mode("append").option("url", about["url"]).option("queue", about["queue"])
    writer.option("txnAppId", about["queue"]).option("txnVersion", version).save()


def streamed(spark: SparkSession, about: dict[str, Any]) -> None:
    source = spark.readStream.schema("n long").parquet(about["folder"])
    if about["deployment"] == "retries":
        source = source.mapInArrow(stumbling, "n long")
    writer = source.writeStream.format("chasqui").trigger(availableNow=True)
    writer = writer.option("url", about["url"]).option("queue", f"{about['queue']}-stream")
    query = writer.option("checkpointLocation", about["checkpoint"]).start()
    query.awaitTermination(90)


def for_each(spark: SparkSession, about: dict[str, Any], **named: str) -> str:
    from chasqui_spark import ChasquiSink

    source = spark.readStream.schema("n long").parquet(about["folder"])
    sink = ChasquiSink(queue=f"{about['queue']}-each", url=about["url"], **named)
    writer = source.writeStream.foreachBatch(sink).trigger(availableNow=True)
    try:
        query = writer.option("checkpointLocation", f"{about['checkpoint']}-each-{len(named)}").start()
        query.awaitTermination(90)
    except Exception as error:  # noqa: BLE001 (told to the test)
        return str(error)
    return ""


def main() -> None:
    about = {**json.loads(sys.argv[2]), "deployment": sys.argv[1]}
    spark = session(about["deployment"])
    rows = spark.range(0, ROWS, 1, 3).selectExpr("id as n")
    if about["deployment"] == "retries":
        rows = rows.mapInArrow(stumbling, "n long")
    numbered(rows, about, 1)
    numbered(rows, about, 1)
    streamed(spark, about)
    told = {"unnamed": for_each(spark, about), "named": for_each(spark, about, txn_app_id=about["queue"])}
    print("TOLD " + json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
