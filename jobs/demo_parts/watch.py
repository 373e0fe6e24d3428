"""What the demo shows while it runs, and how it knows that all is done."""

from __future__ import annotations

import threading
from collections import Counter

from pyspark.sql.streaming import StreamingQuery
from rich.table import Table

from chasqui import Producer, QueueEvents
from demo_parts.orders import QUEUE


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


def all_done(query: StreamingQuery, producer: Producer) -> bool:
    """Whether nothing is left to enqueue or to run. Events would not do: those of a killed worker's last moments are
    missing.
    """
    for _ in range(2):  # looked at before and after Spark has written what it had
        stats = producer.stats()
        if stats.waiting or stats.pending or stats.delayed:
            return False
        query.processAllAvailable()
    return True
