"""How well a queue serves its jobs: runs, failures and how long handlers took, per window of time and job name.

  spark-submit jobs/queue_slo.py --queue emails                                  a table of the last windows
  spark-submit jobs/queue_slo.py --queue emails --max-p99-ms 500 --max-failures 0.01      exit code 1 when missed
  spark-submit jobs/queue_slo.py --queue emails --path slo --checkpoint state/slo --follow 60s

Windows are of the time at which events happened. With --follow a window is written once, when the watermark says that
nothing more of it can come.
"""

from __future__ import annotations

from argparse import Namespace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from chasqui import ConfigError
from chasqui_spark.options import SourceOptions
from chasqui_spark.pipeline import arguments, chosen, interval, run, session, spark_options, trigger


def figures(events: DataFrame, window: str) -> DataFrame:
    """Runs of each window and name: how many, which share failed, and how long they took."""
    finished = events.where("event IN ('completed', 'failed')")
    failed = f.when(f.col("event") == "failed", 1).otherwise(0)
    took = f.percentile_approx("duration_us", f.array(f.lit(0.5), f.lit(0.99)), 10_000)
    return (
        finished.groupBy("queue", f.window("created_at", window).alias("time"), "name")
        .agg(f.count("*").alias("runs"), f.sum(failed).alias("failed"), took.alias("took"))
        .select(
            "queue",
            f.col("time.start").alias("from"),
            f.col("time.end").alias("to"),
            "name",
            "runs",
            (f.col("failed") / f.col("runs")).alias("failure_rate"),
            (f.col("took")[0] / 1000).alias("p50_ms"),
            (f.col("took")[1] / 1000).alias("p99_ms"),
        )
    )


def objectives(flags: Namespace) -> Column:
    """Whether a window has missed one of them."""
    missed = f.lit(False)
    if flags.max_p99_ms is not None:
        missed = missed | (f.col("p99_ms") > flags.max_p99_ms)
    if flags.max_failures is not None:
        missed = missed | (f.col("failure_rate") > flags.max_failures)
    return missed


def check(flags: Namespace) -> None:
    """Flags that would say nothing are refused."""
    following = {"--path": flags.path, "--checkpoint": flags.checkpoint, "--lateness": flags.lateness}
    judging = {"--max-p99-ms": flags.max_p99_ms, "--max-failures": flags.max_failures}
    if flags.follow is not None and not (flags.path and flags.checkpoint):
        raise ConfigError("--follow needs --path, where windows are written, and --checkpoint")
    for name, value in (judging if flags.follow is not None else following).items():
        if value is not None:
            where = "without" if flags.follow is not None else "with"
            raise ConfigError(f"{name} is heeded {where} --follow only: leave one of the two out")
    if flags.max_p99_ms is not None and not flags.max_p99_ms > 0:
        raise ConfigError(f"--max-p99-ms expects milliseconds, more than 0; got {flags.max_p99_ms:g}")
    if flags.max_failures is not None and not 0 <= flags.max_failures <= 1:
        raise ConfigError(f"--max-failures expects a share from 0 to 1, such as 0.01; got {flags.max_failures:g}")


def main(argv: list[str]) -> int:
    parser = arguments(__doc__, SourceOptions, skip=("view", "mode"))
    parser.add_argument("--window", default="1 minute", metavar="TIME", help="length of a window (default: 1 minute)")
    parser.add_argument("--follow", metavar="TIME", help="go on, with a batch every so often, such as 60s")
    parser.add_argument("--lateness", metavar="TIME", help="--follow: how late an event may come (default: 10 seconds)")
    parser.add_argument("--path", metavar="DIR", help="--follow: where the Parquet files go")
    parser.add_argument("--checkpoint", metavar="DIR", help="--follow: where the query remembers what it has done")
    parser.add_argument("--max-p99-ms", type=float, metavar="MS", help="the objective for the 99th percentile")
    parser.add_argument("--max-failures", type=float, metavar="SHARE", help="that for the share of failed runs: 0 to 1")
    flags = parser.parse_args(argv)
    check(flags)
    options = {**spark_options(chosen(SourceOptions, flags, "source")), "view": "events"}
    spark = session("queue SLO")
    window = interval(flags.window)
    if flags.follow is not None:
        events = spark.readStream.format("chasqui").options(**options).load()
        late = figures(events.withWatermark("created_at", interval(flags.lateness or "10s")), window)
        writer = late.writeStream.format("parquet").option("path", flags.path).trigger(**trigger(flags.follow))
        writer.option("checkpointLocation", flags.checkpoint).start().awaitTermination()
        return 0
    events = spark.read.format("chasqui").options(**options).load()
    table = figures(events, window).orderBy("from", "name").cache()
    table.show(1000, truncate=False)
    missed = table.where(objectives(flags)).count()
    print(f"{missed} of {table.count()} windows missed their objective")
    return 1 if missed else 0


if __name__ == "__main__":
    run(main)
