"""A driver program for tests that kill it: processes jobs of a queue and writes down which, at once and to the disk."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession


def main(url: str, queue: str, home: str, die: str, options: dict[str, Any]) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    seen = (Path(home) / "seen").open("a")

    def note(ids: list[str]) -> None:
        seen.write("".join(f"{entry}\n" for entry in ids))
        seen.flush()
        os.fsync(seen.fileno())

    def each(jobs: DataFrame, number: int) -> None:
        ids = [row.entry_id for row in jobs.select("entry_id").collect()]
        if die == "mid-batch" and number == 1:
            note(ids[: len(ids) // 2])
            os.killpg(0, signal.SIGKILL)
        note(ids)
        if die == "before-commit" and number == 1:
            os.killpg(0, signal.SIGKILL)

    jobs = spark.readStream.format("chasqui").options(url=url, queue=queue, mode="consume", **options).load()
    query = jobs.writeStream.option("checkpointLocation", f"{home}/checkpoint").foreachBatch(each).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
