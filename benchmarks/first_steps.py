"""The README's first minute: an embedded server, ten thousand jobs, and what the queue says of itself."""

from __future__ import annotations

import time

from chasqui import Backoff, Producer, RetryOverride

JOBS = 10_000


def main() -> None:
    with Producer("embedded://", queue="emails") as producer:
        print(f"connected: {producer!r}")
        retry = RetryOverride(max_attempts=5, backoff=Backoff.exponential(200, max_delay_ms=10_000))
        start = time.perf_counter()
        ids = producer.add_bulk(({"to": f"user{i}@example.org"} for i in range(JOBS)), name="welcome", retry=retry)
        took = time.perf_counter() - start
        print(f"added {len(ids):,} jobs in {took * 1000:.0f} ms ({len(ids) / took:,.0f} a second)")
        later = producer.add_in(60_000, {"to": "late@example.org"}, id="reminder-1", name="reminder")
        again = producer.add_in(60_000, {"to": "late@example.org"}, id="reminder-1", name="reminder")
        print(f"added {later!r} for a minute from now, twice; it is there once: {later == again}")
        stats = producer.stats()
        print(f"the queue: {stats.waiting:,} waiting, {stats.delayed} delayed, {stats.dlq} dead")
        print(f"cancelled {later!r}: {producer.cancel_delayed(later)}")


if __name__ == "__main__":
    main()
