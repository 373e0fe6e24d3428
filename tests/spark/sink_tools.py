"""What the tests of the sink share: a folder to stream from, a process to kill, and a look at what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import redis

from chasqui import Consumer, Job
from tests.engine.seen import in_delayed
from tests.support import eventually

SCRIPT = str(Path(__file__).with_name("sink_process.py"))
ROOT = str(Path(__file__).parents[2])


def add_rows(folder: Path, numbers: Iterable[int]) -> None:
    """A file of rows with a column n; a stream of the folder reads each file once."""
    folder.mkdir(exist_ok=True)
    name = f"part-{len(list(folder.iterdir())):05d}"
    unfinished = folder / f".{name}"
    pq.write_table(pa.table({"n": pa.array(list(numbers), pa.int64())}), unfinished)
    unfinished.rename(folder / f"{name}.parquet")


def drained(url: str, queue: str) -> Counter[int]:
    """Work off what is ready, with the engine's own worker, and count the payloads' n."""
    found: Counter[int] = Counter()
    client = redis.Redis.from_url(url)

    async def work() -> None:
        consumer = Consumer(url, queue=queue, batch=1000, block_ms=50, delayed_enabled=False, events_enabled=False)

        async def handler(job: Job) -> None:
            found[job.payload["n"]] += 1

        running = asyncio.ensure_future(consumer.run(handler))
        await asyncio.to_thread(eventually, lambda: not client.xlen(f"{{chasqui:{queue}}}:stream"), within=60)
        consumer.stop()
        await running

    asyncio.run(work())
    return found


def all_of(url: str, queue: str) -> tuple[Counter[int], Counter[int]]:
    """What was ready, worked off, and what is for later."""
    later = Counter(job.payload["n"] for job in in_delayed(redis.Redis.from_url(url), queue))
    return drained(url, queue), later


def expected(rows: int) -> tuple[Counter[int], Counter[int]]:
    """Of the rows 0 to ``rows`` that the proof writes: those for now and those for later."""
    return Counter(n for n in range(rows) if n % 10), Counter(n for n in range(rows) if n % 10 == 0)


class SparkProcess:
    """A running ``sink_process.py``. ``pid`` is that of its JVM."""

    def __init__(self, **about: Any) -> None:
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        self._process = subprocess.Popen(
            [
                sys.executable,
                SCRIPT,
                json.dumps({key: str(v) if isinstance(v, Path) else v for key, v in about.items()}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": ROOT, "SPARK_LOCAL_IP": "127.0.0.1"},
        )
        self.errors: list[str] = []
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=lambda: self.errors.extend(self._process.stderr or ()), daemon=True)
        self._reader.start()
        self.pid = int(self._line()["pid"])

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ended(self) -> bool:
        """Wait for the query's end; False where the process died first."""
        try:
            return bool(self._line().get("ended"))
        except AssertionError:
            return False

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            kill_tree(self._process.pid)
        self._process.wait(10)
        self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def __enter__(self) -> SparkProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the Spark process ended: {''.join(self.errors)[-3000:]}"
        found: dict[str, Any] = json.loads(line)
        return found


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all that it has started, as when the machine fails."""
    family = [pid, *_children(pid)]
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _children(pid: int) -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    todo = [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            yield child
            todo.append(child)
