"""A home of Spark for the tests that starts in half the time: ``python -m tests.spark_home FOLDER``.

Spark puts ``pyspark.zip`` before the installed package in the path of each Python process that it starts, and Python
compiles what it imports from a zip anew each time: half a second for each query. This home has links to everything but
that zip, so that the same modules come from the installed package.

A Java machine spends most of its first seconds on reading and checking Spark's classes. ``classes.jsa`` has them in the
form of Java's class data sharing, from one run of a small query; Java ignores it where it does not fit.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pyspark

PARTS = ("bin", "data", "jars", "sbin")
ARCHIVE = "classes.jsa"


def link(home: Path) -> None:
    package = Path(pyspark.__file__).parent
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for part in PARTS:
        if (package / part).exists():
            (home / part).symlink_to(package / part)


def record(archive: Path) -> None:
    """Run batch and stream queries once, and have Java write down on its way out which classes they needed."""
    from pyspark.sql import SparkSession

    from chasqui import Producer, embedded

    fresh = archive.with_suffix(".new")
    os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -XX:ArchiveClassesAtExit={fresh}"
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    with embedded.start() as server, tempfile.TemporaryDirectory() as checkpoint:
        with Producer(server.url, queue="q") as producer:
            producer.add_bulk(range(10))
        given = {"url": server.url, "queue": "q"}
        jobs = session.readStream.format("chasqui").options(**given).load()
        query = (
            jobs.writeStream.foreachBatch(lambda frame, _: frame.groupBy("name").count().collect())
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(100)
        again = session.read.format("chasqui").options(**given).load().selectExpr("payload")
        again.write.format("chasqui").options(url=server.url, queue="copy").mode("append").save()
    gateway = session.sparkContext._gateway  # type: ignore[attr-defined]
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(100)
    if fresh.exists():
        fresh.rename(archive)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    link(folder)
    os.environ["SPARK_HOME"] = str(folder)
    record(folder / ARCHIVE)
