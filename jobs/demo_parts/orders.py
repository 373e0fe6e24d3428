"""The demo's stream: orders arrive as files, are scored by Spark, and become jobs, exactly once."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

QUEUE = "orders"
FILES = 20


def scored(orders: DataFrame) -> DataFrame:
    """Orders as jobs: the score decides the name, and the name how patient the workers are."""
    score = f.abs(f.sin("order")) * f.least(f.col("amount") / 100, f.lit(1.0))
    name = f.when(score > 0.6, "fraud-check").when(score > 0.3, "invoice").otherwise("ship")
    return orders.withColumn("score", score).select(
        name.alias("name"),
        f.struct("order", "customer", "amount", "score").alias("payload"),
        f.when(score > 0.6, 5).otherwise(2).alias("max_attempts"),
        f.lit("exponential").alias("backoff_kind"),
        f.lit(50).alias("backoff_delay_ms"),
    )


def start_query(spark: SparkSession, folder: Path, url: str) -> StreamingQuery:
    orders = spark.readStream.schema("order BIGINT, customer STRING, amount DOUBLE").json(str(folder / "orders"))
    writer = scored(orders).writeStream.format("chasqui").option("url", url).option("queue", QUEUE)
    return writer.option("checkpointLocation", str(folder / "checkpoint")).start()


def write_orders(folder: Path, count: int, seconds: float) -> None:
    """Files of orders, over time, each there in one moment; fewer orders than files leave some out."""
    for n in range(FILES):
        lines = [
            json.dumps({"order": o, "customer": f"c{o % 997}", "amount": (o * 37 % 20_000) / 100})
            for o in range(n * count // FILES, (n + 1) * count // FILES)
        ]
        if lines:
            part = folder / f"part-{n}.tmp"
            with contextlib.suppress(FileNotFoundError):  # the demo has ended before its orders
                part.write_text("\n".join(lines))
                part.rename(folder / "orders" / f"part-{n}.json")
        time.sleep(seconds / FILES)
