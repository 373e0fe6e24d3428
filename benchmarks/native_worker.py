"""Run by the interpreter that has the original's wheel: its worker on a preloaded queue, timed."""

import asyncio
import json
import os
import sys
import time

from chasquimq import Worker


async def main(url: str, queue: str, jobs: int, events: bool) -> None:
    done = 0
    first = last = 0.0
    finished = asyncio.Event()

    async def handler(_: object) -> None:
        nonlocal done, first, last
        if not done:
            first = time.perf_counter()
        done += 1
        if done == jobs:
            last = time.perf_counter()
            finished.set()

    worker = Worker(queue, handler, redis_url=url, concurrency=100, events_enabled=events)
    running = asyncio.ensure_future(worker.run())
    await finished.wait()
    print(json.dumps({"rate": jobs / (last - first)}), flush=True)
    running.cancel()
    os._exit(0)  # the wheel sometimes aborts while the interpreter ends


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "on"))
