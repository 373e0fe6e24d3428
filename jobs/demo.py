"""The whole product in a minute: orders are scored in Spark, enqueued exactly once, worked on, and read back with SQL.

  make demo          or          python jobs/demo.py --orders 20000 --report demo-report.html

A private server is started unless --url names one. Two worker processes run the jobs; one is killed on the way, and
the streaming query is stopped and started again in the middle: nothing may be lost, and no order may become two jobs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from demo_report import figures_of, page
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich.console import Console
from rich.live import Live
from rich.table import Table

from chasqui import Producer, QueueEvents, embedded

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


def start_query(spark: SparkSession, folder: Path, url: str):
    orders = spark.readStream.schema("order BIGINT, customer STRING, amount DOUBLE").json(str(folder / "orders"))
    writer = scored(orders).writeStream.format("chasqui").option("url", url).option("queue", QUEUE)
    return writer.option("checkpointLocation", str(folder / "checkpoint")).start()


def write_orders(folder: Path, count: int, seconds: float) -> None:
    """Files of orders, over time, each there in one moment."""
    each = count // FILES
    for n in range(FILES):
        lines = [
            json.dumps({"order": o, "customer": f"c{o % 997}", "amount": (o * 37 % 20_000) / 100})
            for o in range(n * each, (n + 1) * each)
        ]
        part = folder / f"part-{n}.tmp"
        part.write_text("\n".join(lines))
        part.rename(folder / "orders" / f"part-{n}.json")
        time.sleep(seconds / FILES)


class Watch:
    """Counts events as they come, for the terminal."""

    def __init__(self, url: str) -> None:
        self.seen: Counter[str] = Counter()
        self._events = QueueEvents(url, queue=QUEUE, start="0-0")
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        for event in self._events:
            self.seen[event.name] += 1

    def table(self, producer: Producer, orders: int, note: str) -> Table:
        stats = producer.stats()
        shown = Table.grid(padding=(0, 3))
        for label, value in (
            ("completed", f"{self.seen['completed']:,} of {orders:,}"),
            ("waiting, running, delayed", f"{stats.waiting:,}, {stats.pending:,}, {stats.delayed:,}"),
            ("retried, dead", f"{self.seen['retry-scheduled']:,}, {stats.dlq:,}"),
            ("now", note),
        ):
            shown.add_row(label, value)
        return shown


def all_done(query, producer: Producer) -> bool:
    """Whether nothing is left to enqueue or to run. Events would not do: those of a killed worker's last moments are
    missing.
    """
    for _ in range(2):  # looked at before and after Spark has written what it had
        stats = producer.stats()
        if stats.waiting or stats.pending or stats.delayed:
            return False
        query.processAllAvailable()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=20_000, help=f"how many (default: 20000), a multiple of {FILES}")
    parser.add_argument("--seconds", type=float, default=15, help="over how long they arrive (default: 15)")
    parser.add_argument("--url", help="a server to use; its queue 'orders' must be new")
    parser.add_argument("--report", default="demo-report.html", metavar="FILE")
    flags = parser.parse_args()
    console = Console()
    console.print("starting Spark and a private server ..." if not flags.url else "starting Spark ...")
    builder = SparkSession.builder.appName("chasqui demo").master("local[2]").config("spark.ui.enabled", "false")
    spark = (
        builder.config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    with nullcontext() if flags.url else embedded.start() as server, tempfile.TemporaryDirectory() as temporary:
        url, folder = flags.url or server.url, Path(temporary)
        (folder / "orders").mkdir()
        start_worker = [sys.executable, str(Path(__file__).with_name("demo_worker.py")), url, QUEUE]
        workers = [subprocess.Popen(start_worker, stdin=subprocess.PIPE) for _ in range(2)]
        arriving = threading.Thread(target=write_orders, args=(folder, flags.orders, flags.seconds))
        arriving.start()
        query, watch, producer = start_query(spark, folder, url), Watch(url), Producer(url, queue=QUEUE)
        started, note, step = time.monotonic(), "Spark enqueues, workers work", 0
        try:
            with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
                while arriving.is_alive() or not all_done(query, producer):
                    live.update(watch.table(producer, flags.orders, note))
                    ended = watch.seen["completed"]
                    if step == 0 and ended > flags.orders // 4:
                        workers.pop(0).kill()
                        workers.append(subprocess.Popen(start_worker, stdin=subprocess.PIPE))
                        note, step = "a worker was killed; another took its place", 1
                    elif step == 1 and ended > flags.orders // 2:
                        query.stop()
                        query = start_query(spark, folder, url)
                        note, step = "the streaming query was stopped and started again from its checkpoint", 2
                    if query.exception() or time.monotonic() - started > 180:
                        raise SystemExit(f"the demo did not end: {query.exception() or watch.seen}")
                    time.sleep(0.2)
            figures = figures_of(spark, url, QUEUE, flags.orders)
        finally:
            query.stop()
            producer.close()
            for worker in workers:
                worker.terminate()
                worker.wait(30)
    table = Table(title="what became of the orders", show_header=False)
    for label, value in figures.rows():
        table.add_row(label, value)
    console.print(table)
    Path(flags.report).write_text(page(figures), encoding="utf-8")
    console.print(f"charts: {flags.report}")
    return 0 if figures.lost == figures.doubled == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
