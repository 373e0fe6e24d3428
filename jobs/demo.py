"""The whole product in a minute: orders are scored in Spark, enqueued exactly once, worked on, and read back with SQL.

  make demo          or          python jobs/demo.py --orders 20000 --report demo-report.html

A private server is started unless --url names one. Two worker processes run the jobs; one is killed with jobs in its
hands, and the streaming query is stopped and started again in the middle: nothing may be lost, and no order may become
two jobs.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from demo_parts.crew import Crew
from demo_parts.figures import Figures, figures_of
from demo_parts.orders import QUEUE, start_query, write_orders
from demo_parts.report import page
from demo_parts.watch import Watch, all_done
from rich.console import Console
from rich.live import Live
from rich.table import Table

from chasqui import ConfigError, Producer, embedded
from chasqui_spark.pipeline import run, session

LONGEST_S = 600
SETTINGS = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=20_000, metavar="N", help="how many (default: 20000)")
    parser.add_argument("--seconds", type=float, default=15, help="over how long they arrive (default: 15)")
    parser.add_argument("--url", help="a server to use; its queue 'orders' must be new")
    parser.add_argument("--report", type=Path, default=Path("demo-report.html"), metavar="FILE")
    flags = parser.parse_args(argv)
    if flags.orders < 1 or not 0 <= flags.seconds < LONGEST_S or not flags.report.absolute().parent.is_dir():
        raise ConfigError(
            f"expected --orders from 1, --seconds below {LONGEST_S}, and --report in a folder that is there"
        )
    console = Console()
    with nullcontext() if flags.url else embedded.start() as server, tempfile.TemporaryDirectory() as folder:
        figures = demonstrate(console, flags.url or server.url, flags.orders, flags.seconds, Path(folder))
    table = Table(title="what became of the orders", show_header=False)
    for label, value in figures.rows():
        table.add_row(label, value)
    console.print(table)
    flags.report.write_text(page(figures), encoding="utf-8")
    console.print(f"charts: {flags.report}")
    return 0 if figures.lost == figures.doubled == 0 else 1


def demonstrate(console: Console, url: str, orders: int, seconds: float, folder: Path) -> Figures:
    """Let the orders arrive, do the two things that ought to hurt, and count what came of it."""
    with Producer(url, queue=QUEUE) as producer:
        before = producer.overview()
        if before.added or before.length or before.delayed or before.dlq or before.events:
            raise ConfigError(f"--url expects a server without a queue {QUEUE!r}, got one with {before.events} events")
        console.print("starting Spark ...")
        spark = session("chasqui demo", SETTINGS)
        spark.sparkContext.setLogLevel("OFF")  # stopping the query on purpose would show as errors; its own are raised
        (folder / "orders").mkdir()
        arriving = threading.Thread(target=write_orders, args=(folder, orders, seconds), daemon=True)
        arriving.start()
        query, watch = start_query(spark, folder, url), Watch(url)
        restarted, deadline = False, time.monotonic() + LONGEST_S
        live = Live(console=console, refresh_per_second=4, transient=not console.is_terminal)
        try:
            with Crew(url, lambda: watch.seen["completed"] >= max(1, orders // 4)) as crew, live:
                while arriving.is_alive() or not all_done(query, producer):
                    if not restarted and watch.seen["completed"] > orders // 2:
                        query.stop()
                        query, restarted = start_query(spark, folder, url), True
                    live.update(watch.table(producer, orders, happened(crew.held, restarted)))
                    if time.monotonic() > deadline:
                        raise ConfigError(f"not ended within {LONGEST_S} s: give fewer --orders, or a faster machine")
                    time.sleep(0.2)
        finally:
            query.stop()
        return figures_of(spark, url, QUEUE, orders, crew.held)


def happened(held: int, restarted: bool) -> str:
    killed = f"a worker was killed with {held} jobs in its hands, and replaced" if held else "workers work"
    return f"{killed}; {'the query was stopped and started again' if restarted else 'Spark enqueues'}"


if __name__ == "__main__":
    run(main)
