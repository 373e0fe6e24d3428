"""Work a queue off with Spark: takes what is there, runs a handler on executors, settles every job, and stops.

  spark-submit jobs/drain_queue.py --queue emails --handler shop.mail:send
  spark-submit --py-files shop.zip jobs/drain_queue.py --queue emails --handler shop.mail:router \\
      --checkpoint state/drain --max-jobs-per-trigger 20000 --store-results

The handler is what a worker takes: a function of a job, a Router, a @batch function. Retries that fall due after the
start wait for the next run. Exit code 1 says that there are more dead letters than before.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import chasqui_spark
from chasqui import Overview, Producer
from chasqui.bridge import load_handler
from chasqui_spark.options import SourceOptions, connection_of
from chasqui_spark.pipeline import Counted, arguments, chosen, python_options, run, session

OWN = (
    *("view", "mode", "ack", "leftover", "payload_schema", "filter_pushdown", "fail_on_data_loss"),
    *("queues", "queue_pattern", "discovery_interval"),
    *("starting_offsets", "starting_timestamp", "ending_offsets", "ending_timestamp"),
)


def main(argv: list[str]) -> int:
    parser = arguments(__doc__, SourceOptions, skip=OWN)
    parser.add_argument("--handler", required=True, metavar="MODULE:NAME", help="what to run for each job")
    parser.add_argument("--checkpoint", metavar="DIR", help="where the query remembers what it has taken")
    flags = parser.parse_args(argv)
    options = chosen(SourceOptions, flags, "source")
    handler = load_handler(flags.handler)
    spark = session(f"drain {options.queue}")
    given = asdict(connection_of(options))
    with Producer(given.pop("url"), queue=options.queue or "", **given) as producer:
        before = producer.overview(group=options.group)
        query = chasqui_spark.worker(
            spark,
            handler=handler,
            checkpoint=flags.checkpoint,
            trigger={"availableNow": True},
            **python_options(options),
        )
        started = time.monotonic()

        def tell(done: int) -> None:
            now = producer.overview(group=options.group)
            rate = done / (time.monotonic() - started)
            left = now.waiting + now.pending
            eta = f"{left / rate:,.0f} s" if rate else "unknown"
            failed = f"{dead_since(before, now):,} given up, {now.delayed:,} to be retried"
            print(f"{done:,} done ({failed}), {rate:,.0f}/s, {left:,} left, ETA {eta}", file=sys.stderr)

        done = Counted(query).finish(2, tell)
        after = producer.overview(group=options.group)
        took = time.monotonic() - started
    dead = dead_since(before, after)
    print(
        f"worked on {done:,} jobs in {took:,.1f} s, {done / took:,.0f}/s: {dead:,} new dead letters, "
        f"{after.delayed:,} delayed, {after.waiting:,} waiting"
    )
    return 1 if dead > 0 else 0


def dead_since(before: Overview, after: Overview) -> int:
    """New dead letters, by what the server has counted: some may have been replayed or trimmed meanwhile. Redis 6.2
    does not count, and tells how many there are.
    """
    if before.dead is None or after.dead is None:
        return after.dlq - before.dlq
    return after.dead - before.dead


if __name__ == "__main__":
    run(main)
