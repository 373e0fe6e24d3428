"""``bench``: a quick measurement against the server at hand, on a queue of its own that is removed afterwards."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from dataclasses import fields
from threading import current_thread, main_thread
from typing import Any

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.cli.shown import count, many
from chasqui.consumer import Consumer
from chasqui.options import ConsumerOptions, ProducerOptions
from chasqui.producer import Producer
from chasqui.protocol import observe
from chasqui.protocol.keys import Keys
from chasqui.redis_io import Link

# Killed half way, the queue of the measurement is gone by itself after this time.
_FADE_S = 600
_CHUNK = 10_000
_SINGLES = 200


def declare(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        help="measure how fast this server adds and drains jobs",
        about="Uses a queue of its own, and removes it. It loads the server: not for one that is in use.",
        examples="""
        chasquictl bench
        chasquictl bench --jobs 100000 --bytes 1000 --json
        """,
        queue=False,
        options=ConsumerOptions,
    )
    parser.add_argument("--jobs", type=at_least(1), default=20_000, metavar="N", help="how many (default: 20000)")
    parser.add_argument("--bytes", type=at_least(1), default=100, metavar="N", help="size of a payload (default: 100)")


def run(call: Call) -> int:
    jobs, queue = call.args.jobs, f"chasqui-bench-{uuid.uuid4().hex[:12]}"
    consuming = call.options(ConsumerOptions, "consumer", queue=queue, events_enabled=False)
    adding = call.options(ProducerOptions, "producer", queue=queue, max_stream_len=max(1_000_000, 2 * jobs))
    link = Link(consuming)
    try:
        with Producer(**_given(adding)) as producer:
            figures = _measure(call, producer, link, consuming, jobs)
    finally:
        _remove(link, Keys(queue))
        link.close()
    if call.screen.json:
        call.screen.document(figures)
        return Exit.OK
    call.screen.table(
        ("measured", "result"),
        [
            ("add, one at a time", f"{figures['add_p50_ms']:.2f} ms median, {figures['add_p99_ms']:.2f} ms p99"),
            ("add, in bulk", f"{count(figures['added_per_s'])} jobs/s"),
            ("drain, one worker", f"{count(figures['drained_per_s'])} jobs/s"),
        ],
    )
    call.screen.line(f"{many(jobs, 'job')} of {many(call.args.bytes, 'byte')}, through {link.shown}")
    return Exit.OK


def _remove(link: Link, keys: Keys) -> None:
    """Remove the queue, also when a second Ctrl-C follows the first. What was on its way when the first one came may
    arrive behind the first removal, and make the stream anew.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if current_thread() is main_thread() else None
    try:
        for pause_s in (0.1, 0.4, 0):
            link.run(observe.drop(keys))
            time.sleep(pause_s)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _measure(call: Call, producer: Producer, link: Link, options: ConsumerOptions, jobs: int) -> dict[str, Any]:
    payload = "x" * call.args.bytes
    keys = Keys(options.queue)
    singles = []
    for _ in range(min(_SINGLES, jobs)):
        started = time.perf_counter()
        producer.add(payload)
        singles.append((time.perf_counter() - started) * 1000)
    link.run(observe.fade(keys, _FADE_S))
    spent = 0.0
    with call.screen.progress("adding", jobs) as advance:
        for start in range(0, jobs, _CHUNK):
            chunk = [payload] * min(_CHUNK, jobs - start)
            started = time.perf_counter()
            producer.add_bulk(chunk)
            spent += time.perf_counter() - started
            advance(len(chunk))
    total = jobs + len(singles)
    with call.screen.progress("draining", total) as advance:
        drained_s = asyncio.run(_drain(options, total, advance))
    singles.sort()
    return {
        "jobs": jobs,
        "bytes": call.args.bytes,
        "add_p50_ms": round(singles[len(singles) // 2], 3),
        "add_p99_ms": round(singles[min(len(singles) - 1, len(singles) * 99 // 100)], 3),
        "added_per_s": round(jobs / spent),
        "drained_per_s": round(total / drained_s),
    }


async def _drain(options: ConsumerOptions, total: int, advance: Any) -> float:
    """One worker over all of it; the time from its first job to its last."""
    consumer = Consumer(**_given(options))
    done, first, last = 0, 0.0, 0.0

    async def handler(_: object) -> None:
        nonlocal done, first, last
        last = time.perf_counter()
        first = first or last
        done += 1
        if done % 1000 == 0:
            advance(1000)
        if done >= total:
            consumer.stop()

    await consumer.run(handler)
    return max(last - first, 1e-9)


def _given(options: ProducerOptions | ConsumerOptions) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in fields(options)}
