"""A worker or promoter as a program: ``python -m tests.engine.worker_process <what> <url> <queue> <options>``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import redis

from chasqui import Consumer, Promoter
from tests.engine.worker_tools import QUICK, Journal


def handlers(journal: Journal) -> dict[str, Any]:
    async def note(job: Any) -> None:
        journal.write("start", job.id)

    async def sleep(job: Any) -> None:
        """Sleep for as many seconds as the payload says."""
        journal.write("start", job.id)
        await asyncio.sleep(job.payload)
        journal.write("end", job.id)

    def sleep_in_thread(job: Any) -> None:
        journal.write("start", job.id)
        time.sleep(job.payload)
        journal.write("end", job.id)

    async def kill(job: Any) -> None:
        """End this process as a crash would."""
        journal.write("start", job.id)
        os.kill(os.getpid(), signal.SIGKILL)

    async def kill_by_name(job: Any) -> None:
        """Sleep as ``sleep`` does; a job named deadly ends this process."""
        await (kill if job.name == "deadly" else sleep)(job)

    known = (note, sleep, sleep_in_thread, kill, kill_by_name)
    return {handler.__name__: handler for handler in known}


def main(what: str, url: str, queue: str, given: str) -> None:
    options = json.loads(given)
    with redis.Redis.from_url(url, protocol=2) as client:
        journal = Journal(client, queue)
        if what == "promoter":
            Promoter(url, queue=queue, **options).run_sync()
        else:
            Consumer(url, queue=queue, **QUICK | options).run_sync(handlers(journal)[what])
        journal.write("returned", "")


if __name__ == "__main__":
    main(*sys.argv[1:])
