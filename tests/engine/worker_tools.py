"""Workers for tests: in threads of this process, and in processes of their own, which may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import redis

from chasqui import Consumer, Promoter
from tests.engine.seen import key
from tests.support import eventually

# Short waits everywhere, and nothing that another test has asked for: tests switch on what they are about.
QUICK: dict[str, Any] = {
    "block_ms": 100,
    "claim_min_idle_ms": 5_000,
    "concurrency": 10,
    "delayed_poll_interval_ms": 10,
    "pause_poll_ms": 20,
    "reconnect_initial_ms": 5,
    "reconnect_max_ms": 50,
    "retry_initial_backoff_ms": 1,
    "retry_jitter_ms": 0,
    "run_scheduler": False,
    "shutdown_deadline_secs": 5,
}


class Running:
    """A role that runs in a thread of its own until ``stop`` is called or the ``with`` block ends."""

    def __init__(self, role: Any, *args: Any) -> None:
        self.role = role
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=args, daemon=True)
        self._thread.start()

    def _run(self, *args: Any) -> None:
        try:
            asyncio.run(self.role.run(*args))
        except BaseException as error:  # noqa: BLE001 - kept for whoever joins
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, within: float = 15.0) -> None:
        """Wait for its end, and raise what it ended with."""
        self._thread.join(within)
        assert self.ended, f"still running after {within} s"
        if self.error is not None:
            raise self.error

    def stop(self, within: float = 15.0) -> None:
        self.role.stop()
        self.join(within)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def working(url: str, queue: str, handler: Any, *, metrics: Any = None, **options: Any) -> Running:
    """A consumer at work."""
    return Running(Consumer(url, queue=queue, metrics=metrics, **QUICK | options), handler)


def promoting(url: str, queue: str, *, metrics: Any = None, **options: Any) -> Running:
    """A promoter at work."""
    quick = {"poll_interval_ms": 10, "reconnect_initial_ms": 5, "reconnect_max_ms": 50}
    return Running(Promoter(url, queue=queue, metrics=metrics, **quick | options))


@contextlib.contextmanager
def quiet_joined(url: str, queue: str, handler: Any, **options: Any) -> Iterator[Running]:
    """A consumer that has joined its group and read once."""
    with working(url, queue, handler, **options) as worker:
        eventually(lambda: worker.role.healthy)
        yield worker


def nothing_left(client: redis.Redis, queue: str, group: str = "default") -> bool:
    """Whether every job has been settled: stream, pending list and delayed set are empty."""
    return (
        client.xlen(key(queue, "stream")) == 0
        and client.zcard(key(queue, "delayed")) == 0
        and pending(client, queue, group) == []
    )


def pending(client: redis.Redis, queue: str, group: str = "default") -> list[tuple[str, str, int]]:
    """Entry id, consumer and deliveries of everything that was taken and not settled."""
    try:
        found = client.xpending_range(key(queue, "stream"), group, "-", "+", 10_000)
    except redis.ResponseError:
        return []  # no such group yet
    return [(p["message_id"].decode(), p["consumer"].decode(), p["times_delivered"]) for p in found]


def consumers(client: redis.Redis, queue: str, group: str = "default") -> list[str]:
    return sorted(c["name"].decode() for c in client.xinfo_consumers(key(queue, "stream"), group))


def dead_letters(client: redis.Redis, queue: str) -> list[dict[str, bytes]]:
    """The dead letters in order, each with its fields in the order in which they are stored."""
    return [{k.decode(): v for k, v in fields.items()} for _, fields in client.xrange(key(queue, "dlq"))]


def events(client: redis.Redis, queue: str) -> list[dict[str, str]]:
    """The events in order, each with its fields in the order in which they are stored."""
    found = client.xrange(key(queue, "events"))
    return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in found]


def event_names(client: redis.Redis, queue: str, id: str | None = None) -> list[str]:
    """What happened, or what happened to that job."""
    return [event["e"] for event in events(client, queue) if id is None or event["id"] == id]


def steal_until_renewed(client: redis.Redis, queue: str, entry: str, other: str) -> None:
    """A thief takes that entry and keeps it fresh, until the claim on the other one has been renewed."""
    stream, since = key(queue, "stream"), time.monotonic()

    def renewed() -> bool:
        client.xclaim(stream, "default", "thief", 0, [entry], justid=True)
        (found,) = client.xpending_range(stream, "default", other, other, 1)
        return bool(found["time_since_delivered"] < (time.monotonic() - since) * 1000 - 20)

    eventually(renewed)


class Journal:
    """What handlers in other processes wrote down, in order: pairs of word and job id."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self._client, self._key = client, f"journal:{queue}"

    def write(self, word: str, job_id: str) -> None:
        self._client.rpush(self._key, json.dumps([word, job_id]))
        self._client.expire(self._key, 300)

    def lines(self) -> list[tuple[str, str]]:
        return [tuple(json.loads(line)) for line in self._client.lrange(self._key, 0, -1)]

    def count(self, word: str) -> int:
        return sum(found == word for found, _ in self.lines())


class Process:
    """A worker or promoter in a process of its own; killed when the ``with`` block ends."""

    def __init__(self, what: str, url: str, queue: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.engine.worker_process", what, url, queue, json.dumps(options)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
        self.pid = self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, within: float = 15.0) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(within)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self._process.kill()
        _, said = self._process.communicate()
        sys.stderr.write(said.decode(errors="replace"))


async def until(check: Callable[[], bool]) -> None:
    """Wait in a handler for what another thread does."""
    while not check():  # noqa: ASYNC110 - no event of asyncio's may be set from there
        await asyncio.sleep(0.005)


class Gate:
    """A handler that notes the jobs it was given and holds each until the gate is opened."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []
        self._open = threading.Event()
        if is_open:
            self._open.set()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, job: Any) -> None:
        self.started.append(job.id)
        await until(self._open.is_set)
        self.finished.append(job.id)

    def in_thread(self) -> Callable[[Any], None]:
        """The same as a plain function."""

        def hold(job: Any) -> None:
            self.started.append(job.id)
            assert self._open.wait(30)
            self.finished.append(job.id)

        return hold
