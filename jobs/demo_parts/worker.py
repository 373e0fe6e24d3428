"""A worker of the demo: some of its handlers fail, so that there is something to see. Started by crew.py."""

from __future__ import annotations

import asyncio
import sys
import threading

from chasqui import Consumer, Router, UnrecoverableError


async def invoice(job):
    await asyncio.sleep(0.002)
    return done(job)


async def fraud_check(job):
    """Every fifth order is refused once by a service that is busy."""
    await asyncio.sleep(0.003)
    if job.attempt == 0 and job.payload["order"] % 5 == 0:
        raise TimeoutError("the scoring service is busy")
    return done(job)


async def ship(job):
    """One address in fifty does not exist, and no retry will make it."""
    await asyncio.sleep(0.001)
    if job.payload["order"] % 50 == 7:
        raise UnrecoverableError(f"no such street: order {job.payload['order']}")
    return done(job)


def done(job):
    """What the report needs of a job that is done."""
    return {"order": job.payload["order"], "created_at_ms": job.created_at_ms}


HANDLERS = Router().on("invoice", invoice).on("fraud-check", fraud_check).on("ship", ship)

if __name__ == "__main__":
    url, queue, name = sys.argv[1:]
    consumer = Consumer(
        url,
        queue=queue,
        consumer_id=name,
        concurrency=40,
        claim_min_idle_ms=3_000,
        store_results=True,
        events_max_stream_len=10_000_000,
    )
    # The demo holds the other end: when it is gone, killed or not, so are its workers.
    threading.Thread(target=lambda: (sys.stdin.read(), consumer.stop()), daemon=True).start()
    consumer.run_sync(HANDLERS)
