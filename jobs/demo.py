"""The whole product in a minute: orders are scored in Spark, enqueued exactly once, worked on, and read back with SQL.

  make demo          or          python jobs/demo.py --orders 20000 --report demo-report.html

A private server is started unless --url names one. Two worker processes run the jobs; one is killed on the way, and
the streaming query is stopped and started again in the middle: nothing may be lost, and no order may become two jobs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from demo_figures import figures_of
from demo_orders import FILES, QUEUE, start_query, write_orders
from demo_report import page
from demo_watch import Watch, all_done
from pyspark.sql import SparkSession
from rich.console import Console
from rich.live import Live
from rich.table import Table

from chasqui import Producer, embedded


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
    # Stopping the query on purpose would show as errors; its own are raised below.
    spark.sparkContext.setLogLevel("OFF")
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
