"""Events become history: what happened to jobs, kept as Parquet files partitioned by queue and day.

  spark-submit jobs/archive_events.py --queue emails --path history/events --checkpoint state/events
  spark-submit jobs/archive_events.py --queue-pattern 'mail-*' --path history --checkpoint state/events --follow 60s

The events stream of a queue is capped; what it forgets stays here. One run takes what is there and stops; with --follow
it goes on. A run that was killed is repeated without doubles: the checkpoint and the files agree.
"""

from __future__ import annotations

from pyspark.sql import functions as f

from chasqui_spark.options import SourceOptions
from chasqui_spark.pipeline import Counted, arguments, chosen, run, session, spark_options, trigger


def main(argv: list[str]) -> int:
    parser = arguments(__doc__, SourceOptions, skip=("view", "mode"))
    parser.add_argument("--path", required=True, metavar="DIR", help="where the Parquet files go")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="where the query remembers what it has done")
    parser.add_argument("--follow", metavar="TIME", help="go on, with a batch every so often, such as 60s")
    flags = parser.parse_args(argv)
    options = spark_options(chosen(SourceOptions, flags, "source"))
    spark = session("archive events")
    events = spark.readStream.format("chasqui").options(**options).option("view", "events").load()
    writer = (
        events.withColumn("day", f.to_date("created_at"))
        .writeStream.format("parquet")
        .partitionBy("queue", "day")
        .option("path", flags.path)
        .option("checkpointLocation", flags.checkpoint)
    )
    rows = Counted(writer.trigger(**trigger(flags.follow)).start()).finish()
    print(f"archived {rows:,} events to {flags.path}")
    return 0


if __name__ == "__main__":
    run(main)
