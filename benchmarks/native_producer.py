"""Run by the interpreter that has the original's wheel: its bulk add, timed."""

import asyncio
import json
import os
import sys
import time

import msgpack
from chasquimq._native import Producer


async def main(url: str, jobs: int, bulk: int) -> None:
    producer = Producer(url, queue_name="bench")
    items = [("welcome", msgpack.packb({"to": "ana", "n": i})) for i in range(bulk)]
    await producer.add_bulk_named(items)
    start = time.perf_counter()
    for _ in range(jobs // bulk):
        await producer.add_bulk_named(items)
    print(json.dumps({"rate": jobs / (time.perf_counter() - start)}))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
sys.stdout.flush()
os._exit(0)  # the wheel sometimes aborts while the interpreter ends
