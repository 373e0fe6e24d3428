"""Files become jobs: every row of Parquet, JSON or CSV files is added to a queue, once.

  spark-submit jobs/enqueue_files.py --input data/leads --format parquet --queue emails --name welcome
  spark-submit jobs/enqueue_files.py --input data/leads --stream --checkpoint state/leads --queue emails

Columns queue, id, name, payload, delay_ms, run_at, retry, max_attempts and backoff_* mean what they say; without a
column payload all the others become one map. A batch is written exactly once with --txn-app-id and --txn-version; a
stream always is: it takes the files that are there and stops, and the next run with the same checkpoint takes the new.
"""

from __future__ import annotations

from argparse import Namespace

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from chasqui import ConfigError
from chasqui.bridge import Transactions
from chasqui_spark.options import SinkOptions, connection_of
from chasqui_spark.pipeline import Counted, arguments, chosen, run, session, spark_options

READERS = {"csv": {"header": "true", "inferSchema": "true"}, "json": {}, "parquet": {}}


def main(argv: list[str]) -> int:
    parser = arguments(__doc__, SinkOptions)
    parser.add_argument("--input", required=True, metavar="PATH", help="file, folder or glob to read")
    parser.add_argument("--format", choices=sorted(READERS), default="parquet")
    parser.add_argument("--select", metavar="SQL", help="expressions to make the columns of, such as 'kind AS name, *'")
    parser.add_argument("--stream", action="store_true", help="only files that this checkpoint has not seen")
    parser.add_argument("--checkpoint", metavar="DIR", help="--stream: where it remembers what it has done")
    flags = parser.parse_args(argv)
    if flags.stream != bool(flags.checkpoint):
        raise ConfigError("--stream and --checkpoint, a folder of its own, go together: give both or none")
    options = chosen(SinkOptions, flags, "sink")
    spark = session(f"enqueue {flags.input}")
    rows = spark.read.format(flags.format).options(**READERS[flags.format]).load(flags.input)
    told = stream(spark, flags, rows, options) if flags.stream else batch(flags, rows, options)
    print(f"{told} of {flags.input}")
    return 0


def batch(flags: Namespace, rows: DataFrame, options: SinkOptions) -> str:
    """All rows; a version that is there already is not written again, and that is said."""
    there = is_there(options)
    seen = Observation()
    counted = selected(rows, flags.select).observe(seen, f.count(f.lit(1)).alias("rows"))
    counted.write.format("chasqui").mode("append").options(**spark_options(options)).save()
    if there:
        writer = f"{options.txn_app_id} has version {options.txn_version} already"
        return f"skipped {seen.get['rows']:,} rows, because {writer},"
    bad = "" if options.bad_rows == "fail" else ", less the bad ones that the log counts,"
    return f"enqueued {seen.get['rows']:,} rows{bad}"


def is_there(options: SinkOptions) -> bool:
    """Whether this batch was written before: under its version or, as the sink takes it, under a later one."""
    if options.txn_app_id is None or options.txn_version is None:
        return False
    with Transactions(connection_of(options)) as transactions:
        home = transactions.standing(options.txn_app_id)
    if home is None or home.version < options.txn_version:
        return False
    return home.version > options.txn_version or home.state == "done"


def stream(spark: SparkSession, flags: Namespace, like: DataFrame, options: SinkOptions) -> str:
    """All files that are new, in one go; rows have the columns that a look at the present files shows."""
    reader = spark.readStream.format(flags.format).schema(like.schema).options(**READERS[flags.format])
    writer = selected(reader.load(flags.input), flags.select).writeStream.format("chasqui")
    writer = writer.options(**spark_options(options)).option("checkpointLocation", flags.checkpoint)
    return f"enqueued {Counted(writer.trigger(availableNow=True).start()).finish():,} new rows"


def selected(rows: DataFrame, select: str | None) -> DataFrame:
    return rows.sparkSession.sql(f"SELECT {select} FROM {{rows}}", rows=rows) if select else rows


if __name__ == "__main__":
    run(main)
