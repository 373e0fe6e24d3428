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

from dataclasses import fields
from datetime import datetime

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from chasqui import ConfigError
from chasqui.bridge import ConnectionOptions, add_arguments
from chasqui_spark.options import ReplayOptions, SourceOptions
from chasqui_spark.pipeline import arguments, chosen, run, session, spark_options

SHARED = ("replay_from", "queue", *(field.name for field in fields(ConnectionOptions)))


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


def put_back(letters: DataFrame, back: ReplayOptions, *, repaired: bool) -> tuple[int, datetime | None]:
    """Replay them; how many were given to that, and which is the newest of them."""
    seen = Observation()
    chosen_ones = letters.observe(seen, f.count(f.lit(1)).alias("letters"), f.max("enqueued_at").alias("newest"))
    columns = ["queue", "entry_id", *(["payload"] if repaired else [])]
    writer = chosen_ones.select(columns).write.format("chasqui").mode("append").options(**spark_options(back))
    writer.option("replayFrom", "dlq").save()
    return seen.get["letters"], seen.get["newest"]


def main(argv: list[str]) -> int:
    parser = arguments(__doc__, SourceOptions, skip=("view", "mode", "max_payload_bytes"))
    parser.add_argument("--where", default="true", metavar="SQL", help="which letters (default: all)")
    parser.add_argument("--replay", action="store_true", help="put the chosen letters back to work")
    parser.add_argument(
        "--repair", metavar="SQL", help="--replay: a new payload; --payload-schema lets it look into the old one"
    )
    add_arguments(parser.add_argument_group("options of --replay"), ReplayOptions, skip=SHARED)
    flags = parser.parse_args(argv)
    for name, value in (("--repair", flags.repair), ("--max-per-second", flags.max_per_second)):
        if value is not None and not flags.replay:
            raise ConfigError(f"{name} is heeded with --replay only: give both or none")
    source = chosen(SourceOptions, flags, "source")
    back = chosen(ReplayOptions, flags, "replay")
    spark = session("triage of dead letters")

    def letters() -> DataFrame:
        view = spark.read.format("chasqui").options(**spark_options(source)).option("view", "dlq").load()
        return view.where(flags.where)

    report(letters()).show(200, truncate=60)
    if not flags.replay:
        return 0
    given = letters().withColumn("payload", f.expr(flags.repair)) if flags.repair else letters()
    found, newest = put_back(given, back, repaired=bool(flags.repair))
    left, old = letters().agg(f.count(f.lit(1)), f.count_if(f.col("enqueued_at") <= f.lit(newest))).first()
    print(f"replayed {found - old:,} of {found:,} dead letters; {left:,} such letters are left")
    return 0


if __name__ == "__main__":
    run(main)
