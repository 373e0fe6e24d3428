"""Files become jobs: every row of Parquet, JSON or CSV files is added to a queue, once.

  spark-submit jobs/enqueue_files.py --input data/leads --format parquet --queue emails --name welcome
  spark-submit jobs/enqueue_files.py --input data/leads --stream --checkpoint state/leads --queue emails

Columns queue, id, name, payload, delay_ms, run_at, retry, max_attempts and backoff_* mean what they say; without a
column payload all the others become one map. A batch is written exactly once with --txn-app-id and --txn-version; a
stream always is: it takes the files that are there and stops, and the next run with the same checkpoint takes the new.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from chasqui_spark.options import SinkOptions
from chasqui_spark.pipeline import Counted, arguments, chosen, run, spark_options

READERS = {"csv": {"header": "true", "inferSchema": "true"}, "json": {}, "parquet": {}}


def main(argv: list[str]) -> int:
    parser = arguments(__doc__, SinkOptions)
    parser.add_argument("--input", required=True, metavar="PATH", help="file, folder or glob to read")
    parser.add_argument("--format", choices=sorted(READERS), default="parquet")
    parser.add_argument("--select", metavar="SQL", help="expressions to make the columns of, such as 'kind AS name, *'")
    parser.add_argument("--stream", action="store_true", help="only files that this checkpoint has not seen")
    parser.add_argument("--checkpoint", metavar="DIR", help="where a stream remembers what it has done")
    flags = parser.parse_args(argv)
    if flags.stream and not flags.checkpoint:
        parser.error("--stream needs --checkpoint, a folder of its own")
    options = spark_options(chosen(SinkOptions, flags, "sink"))
    spark = SparkSession.builder.appName(f"enqueue {flags.input}").getOrCreate()
    rows = spark.read.format(flags.format).options(**READERS[flags.format]).load(flags.input)
    if flags.stream:
        return stream(spark, flags.format, flags.input, flags.checkpoint, flags.select, rows, options)
    selected(rows, flags.select).write.format("chasqui").mode("append").options(**options).save()
    print(f"enqueued {rows.count():,} rows of {flags.input}")
    return 0


def stream(
    spark: SparkSession,
    kind: str,
    path: str,
    checkpoint: str,
    select: str | None,
    like: DataFrame,
    options: dict[str, str],
) -> int:
    """All files that are new, in one go; rows have the columns that a look at the present files shows."""
    source = spark.readStream.format(kind).schema(like.schema).options(**READERS[kind]).load(path)
    query = (
        selected(source, select)
        .writeStream.format("chasqui")
        .options(**options)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    print(f"enqueued {Counted(query).finish():,} new rows of {path}")
    return 0


def selected(rows: DataFrame, select: str | None) -> DataFrame:
    return rows.sparkSession.sql(f"SELECT {select} FROM {{rows}}", rows=rows) if select else rows


if __name__ == "__main__":
    run(main)
