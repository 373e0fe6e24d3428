"""Dead letters: a report by reason and name, and back to the queue with what is worth another try.

  spark-submit jobs/dlq_triage.py --queue emails
  spark-submit jobs/dlq_triage.py --queue emails --where "reason = 'retries_exhausted'" --replay
  spark-submit jobs/dlq_triage.py --queue emails --payload-schema 'to STRING, n INT' \\
      --where "payload.to LIKE ' %'" --repair "named_struct('to', trim(payload.to), 'n', payload.n)" \\
      --replay --max-per-second 50

--where is SQL over the columns of the dlq view, --repair an SQL expression for the new payload. A letter that goes back
leaves the dead letters in the same step, once, with attempt 0.
"""

from __future__ import annotations

from dataclasses import asdict

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from chasqui_spark.options import ReplayOptions, SourceOptions, connection_of
from chasqui_spark.pipeline import arguments, chosen, run, spark_options


def report(letters: DataFrame) -> DataFrame:
    """How many of each kind, since when, and one error to look at."""
    return (
        letters.groupBy("queue", "reason", "name")
        .agg(
            f.count("*").alias("letters"),
            f.min("enqueued_at").alias("oldest"),
            f.max("enqueued_at").alias("newest"),
            f.substring_index(f.max_by("failure", "enqueued_at"), "\n", 1).alias("last failure"),
        )
        .orderBy(f.desc("letters"), "queue", "reason", "name")
    )


def main(argv: list[str]) -> int:
    parser = arguments(__doc__, SourceOptions, skip=("view", "mode", "max_payload_bytes"))
    parser.add_argument("--where", default="true", metavar="SQL", help="which letters (default: all)")
    parser.add_argument(
        "--repair", metavar="SQL", help="a new payload; needs --payload-schema to look into the old one"
    )
    parser.add_argument("--replay", action="store_true", help="put the chosen letters back to work")
    parser.add_argument("--max-per-second", type=int, metavar="N", help="--replay: not faster than this")
    flags = parser.parse_args(argv)
    source = chosen(SourceOptions, flags, "source")
    spark = SparkSession.builder.appName("triage of dead letters").getOrCreate()
    letters = spark.read.format("chasqui").options(**spark_options(source)).option("view", "dlq").load()
    letters = letters.where(flags.where)
    report(letters).show(200, truncate=60)
    if not flags.replay:
        return 0
    if flags.repair:
        letters = letters.withColumn("payload", f.expr(flags.repair))
    back = ReplayOptions(**asdict(connection_of(source)), max_per_second=flags.max_per_second)
    columns = ["queue", "entry_id", *(["payload"] if flags.repair else [])]
    writer = letters.select(columns).write.format("chasqui").mode("append").options(**spark_options(back))
    writer.option("replayFrom", "dlq").save()
    left = spark.read.format("chasqui").options(**spark_options(source)).option("view", "dlq").load()
    print(f"{left.where(flags.where).count():,} such letters are left")
    return 0


if __name__ == "__main__":
    run(main)
