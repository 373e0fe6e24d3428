"""Runs under the interpreter that has the original's wheel; imports nothing of ours.

worker_native_events.py <url> <queue> <count>   the first so many events of the queue, a line of JSON for each
"""

import asyncio
import json
import os
import sys

import chasquimq


async def main(url, queue, count):
    events = chasquimq.QueueEvents(queue, redis_url=url, last_event_id="0", block_ms=1000)
    left = int(count)
    async for event in events:
        print(json.dumps([event.name, event.job_id, event.job_name, event.fields], default=repr), flush=True)
        left -= 1
        if not left:
            break
    await events.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    os._exit(0)
