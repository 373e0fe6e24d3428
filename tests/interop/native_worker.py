"""Runs under the interpreter that has the original's wheel (CHASQUI_NATIVE_PYTHON); imports nothing of ours.

    native_worker.py work <url> <queue> <options>   a Worker until stdin ends; a line of JSON per run of the handler
    native_worker.py call <url> <queue> <calls>     calls on one Queue, [[method, args, kwargs], ...]; a line for each

The handler does what the job's data ask for: {"fail_until": n} fails while the attempt is below n, {"give_up": true}
raises UnrecoverableError, anything else succeeds with the data as its result.
"""

import asyncio
import dataclasses
import json
import os
import sys

import chasquimq


def tell(**values):
    print(json.dumps(values, default=repr), flush=True)


async def handle(job):
    tell(id=job.id, name=job.name, data=job.data, attempt=job.attempt, created_at_ms=job.created_at_ms)
    wishes = job.data if isinstance(job.data, dict) else {}
    if wishes.get("give_up"):
        raise chasquimq.UnrecoverableError("asked to give up")
    if job.attempt < wishes.get("fail_until", 0):
        raise ValueError("asked to fail")
    return job.data


async def work(url, queue, options):
    worker = chasquimq.Worker(queue, handle, redis_url=url, **options)
    running = asyncio.create_task(worker.run())
    tell(ready=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.close()
    await running


async def call(url, queue, calls):
    async with chasquimq.Queue(queue, redis_url=url) as native:
        for method, args, kwargs in calls:
            answer = await getattr(native, method)(*args, **kwargs)
            if isinstance(answer, chasquimq.Job):
                answer = {f.name: getattr(answer, f.name) for f in dataclasses.fields(answer) if f.name[0] != "_"}
            tell(answer=answer)


if __name__ == "__main__":
    mode, *where, given = sys.argv[1:]
    asyncio.run({"work": work, "call": call}[mode](*where, json.loads(given)))
    # The wheel's own threads now and then crash an interpreter that takes itself down in order.
    os._exit(0)
