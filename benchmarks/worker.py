"""How fast jobs are worked off, how soon, and in how much memory."""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import redis

from benchmarks.harness import Row, compare, native_python, redis8, server, skipped
from chasqui import Consumer, NoopSink, Producer, Promoter, PromoterTick, batch
from chasqui.protocol.keys import Keys

JOBS = 200_000
QUEUE = "bench"
TUNED: dict[str, Any] = {"concurrency": 100, "batch": 512, "block_ms": 100, "ack_batch": 1000}


def preload(url: str, jobs: int) -> None:
    plain = redis.Redis.from_url(url)
    plain.flushall()
    with Producer(url, queue=QUEUE, max_stream_len=4_000_000) as producer:
        for start in range(0, jobs, 1000):
            producer.add_bulk([{"to": "ana", "n": n} for n in range(start, start + 1000)], name="welcome")


def drain(url: str, jobs: int, *, batched: bool = False, **options: Any) -> float:
    """Jobs a second of one worker process with a handler that does nothing."""
    return float(_worker(url, jobs, batched, options)["rate"])


def _worker(url: str, jobs: int, batched: bool, options: dict[str, Any]) -> dict[str, Any]:
    about = json.dumps({"url": url, "jobs": jobs, "batched": batched, "options": {**TUNED, **options}})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.worker", about], capture_output=True, text=True, check=True, timeout=600
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _work(url: str, jobs: int, batched: bool, options: dict[str, Any]) -> None:
    """What runs in that process: as a user would, by run_sync."""
    consumer = Consumer(url, queue=QUEUE, **options)
    done = 0
    first = last = 0.0

    def count(more: int) -> None:
        nonlocal done, first, last
        if not done:
            first = time.perf_counter()
        done += more
        if done >= jobs and not last:
            last = time.perf_counter()
            consumer.stop()

    async def single(_: Any) -> None:
        count(1)

    @batch(max_jobs=500, max_wait_ms=5)
    async def many(taken: list[Any]) -> None:
        count(len(taken))

    consumer.run_sync(many if batched else single)
    print(json.dumps({"rate": jobs / (last - first), "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


def bare_loop(url: str, jobs: int) -> float:
    """XREADGROUP 1000, decode, acknowledge and delete, in one process: the least that a worker can do."""
    plain = redis.Redis.from_url(url, protocol=2)
    stream = Keys(QUEUE).stream
    plain.xgroup_create(stream, "default", id="0", mkstream=True)
    modern = redis8() is not None and "xackdel" in {name.lower() for name in plain.command()}
    start = time.perf_counter()
    left = jobs
    while left > 0:
        reply = plain.execute_command("XREADGROUP", "GROUP", "default", "c", "COUNT", 1000, "STREAMS", stream, ">")
        entries = reply[0][1]
        for _, fields in entries:
            data = fields[b"d"] if isinstance(fields, dict) else fields[1]
            msgpack.unpackb(msgpack.unpackb(data)[1])
        ids = [entry[0] for entry in entries]
        if modern:
            plain.execute_command("XACKDEL", stream, "default", "IDS", len(ids), *ids)
        else:
            with plain.pipeline() as pipe:
                pipe.xack(stream, "default", *ids)
                pipe.xdel(stream, *ids)
                pipe.execute()
        left -= len(entries)
    return jobs / (time.perf_counter() - start)


def _against_native(name: str, events: bool, target: float) -> Row:
    binary, python = redis8(), native_python()
    against = f"chasquimq.Worker(concurrency=100), events {'on' if events else 'off'}"
    if not binary or not python:
        return skipped(name, "needs Redis 8.10 and the wheel chasquimq", target=target, unit="jobs/s", against=against)
    with server(binary) as redis8_server:
        url = redis8_server.url

        def ours() -> float:
            preload(url, JOBS)
            return drain(url, JOBS, events_enabled=events)

        def native() -> float:
            jobs = JOBS // 10
            preload(url, jobs)
            script = Path(__file__).with_name("native_worker.py")
            command = [python, str(script), url, QUEUE, str(jobs), "on" if events else "off"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            return float(json.loads(done.stdout.splitlines()[-1])["rate"])

        return compare(name, ours, native, target=target, unit="jobs/s", against=against)


def worker_events_on_vs_native() -> Row:
    """A coroutine handler that does nothing, events on. Ours with batch=512, block_ms=100 and ack_batch=1000; the
    original's Python worker with its defaults. Both with concurrency=100, on Redis 8.10.
    """
    return _against_native("worker_events_on_vs_native", True, 8.0)


def worker_events_off_vs_native() -> Row:
    """The same with events off on both sides."""
    return _against_native("worker_events_off_vs_native", False, 6.0)


def batch_worker_vs_bare_loop() -> Row:
    """A batch handler that does nothing, events off, against a loop of plain redis-py in one process: read 1,000,
    decode, ack. Ours reads and acks at the same time, so it may be faster than the loop.
    """
    with server() as valkey:

        def ours() -> float:
            preload(valkey.url, JOBS)
            return drain(valkey.url, JOBS, batched=True, events_enabled=False, batch=1000)

        def bare() -> float:
            preload(valkey.url, JOBS)
            return bare_loop(valkey.url, JOBS)

        return compare(
            "batch_worker_vs_bare_loop", ours, bare, target=0.5, unit="jobs/s", against="read 1000, decode, ack"
        )


def worker_million_waiting() -> Row:
    """The rate with a million jobs waiting against that with ten thousand, over the same number of jobs."""
    jobs = 10_000
    with server() as valkey:

        def rate(waiting: int) -> float:
            preload(valkey.url, waiting)
            return drain(valkey.url, jobs, events_enabled=False)

        return compare(
            "worker_million_waiting",
            lambda: rate(1_000_000),
            lambda: rate(jobs),
            target=0.85,
            unit="jobs/s",
            against="10,000 waiting",
        )


def _latencies(url: str) -> tuple[list[float], float]:
    """Seconds from add to handler on an idle queue, and one loopback round trip."""

    async def work() -> tuple[list[float], float]:
        from chasqui import AsyncProducer
        from chasqui.protocol.flow import command
        from chasqui.redis_io import AsyncLink

        consumer = Consumer(url, queue=QUEUE, block_ms=5000)
        arrived: asyncio.Queue[float] = asyncio.Queue()

        async def handler(_: Any) -> None:
            arrived.put_nowait(time.perf_counter())

        running = asyncio.ensure_future(consumer.run(handler))
        took: list[float] = []
        trips: list[float] = []
        async with AsyncProducer(url, queue=QUEUE) as producer:
            link: AsyncLink = producer._link
            for _ in range(500):
                start = time.perf_counter()

                def ping() -> Any:
                    yield command("PING", safe=True)

                await link.run(ping())
                trips.append(time.perf_counter() - start)
                start = time.perf_counter()
                await producer.add(1)
                took.append(await arrived.get() - start)
                await asyncio.sleep(0.002)
        consumer.stop()
        await running
        return took[50:], statistics.median(trips[50:])

    return asyncio.run(work())


def _latency(name: str, percentile: int, target: float) -> Row:
    with server() as valkey:
        found = [_latencies(valkey.url) for _ in range(3)]
        worst = iter([statistics.quantiles(took, n=100)[percentile - 1] * 1e6 for took, _ in found])
        trips = iter([trip * 1e6 for _, trip in found])
        return compare(
            name,
            lambda: next(worst),
            lambda: next(trips),
            target=target,
            unit="us",
            against="a loopback round trip",
            at_most=True,
        )


def latency_p50() -> Row:
    """From add to the handler's start on an idle queue, the median, against a round trip of the same client."""
    return _latency("latency_p50", 50, 3.0)


def latency_p99() -> Row:
    """The same, the 99th percentile."""
    return _latency("latency_p99", 99, 10.0)


def promote_vs_lua() -> Row:
    """100,000 due jobs through the promoter against a bare Lua loop that adds as many entries."""
    jobs = 100_000
    with server() as valkey:
        plain = redis.Redis.from_url(valkey.url, protocol=2)
        keys = Keys(QUEUE)

        def ours() -> float:
            plain.flushall()
            with Producer(valkey.url, queue=QUEUE) as producer:
                for _ in range(jobs // 1000):
                    producer.add_in_bulk(1, [{"to": "ana", "n": n} for n in range(1000)], name="welcome")
            return asyncio.run(_promote_all(valkey.url, jobs))

        def bare() -> float:
            plain.flushall()
            envelope = b"x" * 60
            script = "for i = 1, 1000 do redis.call('XADD', KEYS[1], '*', 'd', ARGV[1], 'n', ARGV[2]) end"
            start = time.perf_counter()
            for _ in range(jobs // 1000):
                plain.eval(script, 1, keys.stream, envelope, "welcome")
            return jobs / (time.perf_counter() - start)

        return compare("promote_vs_lua", ours, bare, target=0.5, unit="jobs/s", against="XADDs in a Lua loop")


async def _promote_all(url: str, jobs: int) -> float:
    """The promoter's own loop, events off, until all are moved."""
    promoted = 0
    start = time.perf_counter()

    class Count(NoopSink):
        def promoter_tick(self, tick: PromoterTick) -> None:
            nonlocal promoted
            promoted += tick.promoted
            if promoted >= jobs:
                promoter.stop()

    promoter = Promoter(url, queue=QUEUE, metrics=Count(), promote_batch=1000, events_enabled=False)
    await promoter.run()
    return jobs / (time.perf_counter() - start)


def worker_million_memory() -> Row:
    """Peak memory of a worker that does a million jobs, against one that does a hundred thousand."""
    with server() as valkey:

        def peak(jobs: int) -> float:
            preload(valkey.url, jobs)
            return float(_worker(valkey.url, jobs, False, {})["peak"])

        return compare(
            "worker_million_memory",
            lambda: peak(1_000_000),
            lambda: peak(100_000),
            target=1.1,
            unit="KiB at the peak",
            against="a tenth of the jobs",
            at_most=True,
            repeats=1,
        )


ROWS: dict[str, Callable[[], Row]] = {
    "worker_events_on_vs_native": worker_events_on_vs_native,
    "worker_events_off_vs_native": worker_events_off_vs_native,
    "batch_worker_vs_bare_loop": batch_worker_vs_bare_loop,
    "worker_million_waiting": worker_million_waiting,
    "latency_p50": latency_p50,
    "latency_p99": latency_p99,
    "promote_vs_lua": promote_vs_lua,
    "worker_million_memory": worker_million_memory,
}

if __name__ == "__main__":
    _work(**json.loads(sys.argv[1]))
