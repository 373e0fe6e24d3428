"""What the demo has done, found by SQL over the queue's own views."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

ORDER = "order BIGINT, customer STRING, amount DOUBLE, score DOUBLE"


@dataclass(frozen=True)
class Figures:
    """What happened, as Spark found it in events, results and dead letters."""

    enqueued: int
    completed: int
    retried: int
    dead: int
    lost: int
    doubled: int
    run_again: int
    seconds: float
    latency_ms: list[float]
    per_second: list[tuple[int, int, int]]
    outcomes: list[tuple[str, int, int, int]]

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("orders enqueued by Spark", f"{self.enqueued:,}"),
            ("completed", f"{self.completed:,}"),
            ("retried", f"{self.retried:,}"),
            ("dead letters", f"{self.dead:,}"),
            ("lost", f"{self.lost:,}"),
            ("doubled", f"{self.doubled:,}"),
            ("run again because their worker was killed", f"{self.run_again:,}"),
            ("rate", f"{self.completed / max(self.seconds, 0.001):,.0f} jobs/s"),
            ("latency p50", f"{self.percentile(0.5):,.0f} ms"),
            ("latency p99", f"{self.percentile(0.99):,.0f} ms"),
        ]

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latency_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def figures_of(spark: SparkSession, url: str, queue: str, orders: int, run_again: int) -> Figures:
    """What happened, by SQL over the queue's own views. How many jobs the killed worker had in hand was seen then."""

    def view(name: str, schema: str = "") -> DataFrame:
        reader = spark.read.format("chasqui").option("url", url).option("queue", queue).option("view", name)
        return (reader.option("payloadSchema", schema) if schema else reader).load()

    events = view("events").select("id", "name", "event", "attempt", f.unix_millis("created_at").alias("at")).cache()
    results = view("results", "order BIGINT, created_at_ms BIGINT").selectExpr("id", "result.*").cache()
    letters = view("dlq", ORDER).selectExpr("id", "name", "payload.order").cache()
    jobs_of = results.select("order").union(letters.select("order")).groupBy("order").count().cache()
    ended = events.where("event = 'completed'").groupBy("id").agg(f.min("at").alias("at"))
    joined = results.join(ended, "id").select(f.col("created_at_ms").alias("born"), "at").cache()
    first = joined.agg(f.min("born")).first()[0] or 0
    per_second = (
        joined.selectExpr(f"stack(2, (born - {first}) DIV 1000, 1, 0, (at - {first}) DIV 1000, 0, 1) AS (s, a, b)")
        .groupBy("s")
        .agg(f.sum("a"), f.sum("b"))
        .orderBy("s")
    )
    last = events.where("event = 'completed'").groupBy("id", "name").agg(f.max("attempt").alias("attempt"))
    done = last.groupBy("name").agg(f.sum(f.expr("int(attempt = 1)")), f.sum(f.expr("int(attempt > 1)"))).collect()
    dead = {row[0]: row[1] for row in letters.groupBy("name").count().collect()}
    return Figures(
        enqueued=jobs_of.agg(f.sum("count")).first()[0] or 0,
        completed=results.count(),
        retried=events.where("event = 'retry-scheduled'").count(),
        dead=letters.count(),
        lost=orders - jobs_of.count(),
        doubled=jobs_of.where("count > 1").count(),
        run_again=run_again,
        seconds=joined.agg((f.max("at") - f.min("born")) / 1000).first()[0] or 0.0,
        latency_ms=[row[0] for row in joined.selectExpr("double(at - born)").collect()],
        per_second=[tuple(row) for row in per_second.collect()],
        outcomes=sorted((row[0], row[1], row[2], dead.get(row[0], 0)) for row in done),
    )
