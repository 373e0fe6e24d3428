"""A Spark of its own that streams a folder into a queue, made to be killed: ``python sink_process.py '<json>'``.

Says ``{"pid": <of the JVM>}`` when it is up, starts the query when a line comes in, and says how it ended.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def rows_of(spark: SparkSession, folder: str) -> DataFrame:
    """What the proof writes: every tenth row is for later."""
    stream = spark.readStream.schema("n long").parquet(folder)
    return stream.withColumn("delay_ms", f.when(f.col("n") % 10 == 0, f.lit(3_600_000)).otherwise(f.lit(0)))


def start(spark: SparkSession, about: dict[str, str]) -> object:
    writer = rows_of(spark, about["folder"]).writeStream.trigger(availableNow=True)
    writer = writer.option("checkpointLocation", about["checkpoint"])
    if about.get("sink") == "foreachBatch":
        from chasqui_spark import ChasquiSink

        return writer.foreachBatch(ChasquiSink(queue=about["queue"], url=about["url"])).start()
    return writer.format("chasqui").option("url", about["url"]).option("queue", about["queue"]).start()


def main() -> None:
    about = json.loads(sys.argv[1])
    builder = SparkSession.builder.master(about.get("master", "local[2]")).config("spark.ui.enabled", "false")
    for name, value in {
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        **about.get("config", {}),
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    assert spark._jvm is not None
    print(json.dumps({"pid": spark._jvm.java.lang.ProcessHandle.current().pid()}), flush=True)
    sys.stdin.readline()
    query = start(spark, about)
    query.awaitTermination()  # type: ignore[attr-defined]
    print(json.dumps({"ended": True}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
