"""Stopping: what runs may finish, what waits goes back at once and unburned, and the deadline holds."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui import Consumer, Producer
from chasqui.embedded import EmbeddedServer
from tests.engine.seen import key
from tests.engine.worker_proxy import script_proxy
from tests.engine.worker_tools import (
    QUICK,
    Gate,
    Journal,
    Process,
    Running,
    consumers,
    dead_letters,
    nothing_left,
    pending,
    quiet_joined,
    until,
    working,
)
from tests.proxy import Act
from tests.support import eventually

StartLike = Callable[..., EmbeddedServer]
STALE_AFTER_MS = 30_000


# Jobs in hand


def test_running_handlers_finish_and_are_acknowledged(url: str, client: redis.Redis, queue: str) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer, working(url, queue, gate) as worker:
        ids = producer.add_bulk(range(3))
        eventually(lambda: len(gate.started) == 3)
        worker.role.stop()
        time.sleep(0.1)
        assert not worker.ended
        gate.open()
        worker.join(within=3)

    assert sorted(gate.finished) == sorted(ids)
    assert nothing_left(client, queue)
    assert consumers(client, queue) == []


@pytest.mark.parametrize("outcome", ["result", "retry", "dead letter"])
def test_the_outcome_of_a_job_that_ends_during_the_stop_is_written(
    url: str, client: redis.Redis, queue: str, outcome: str
) -> None:
    gate = Gate()

    async def handler(job: Any) -> str:
        await gate(job)
        if outcome != "result":
            raise ValueError("boom")
        return "done"

    options = {"max_attempts": 1 if outcome == "dead letter" else 3, "store_results": True}
    with Producer(url, queue=queue) as producer:
        with working(url, queue, handler, **options) as worker:
            producer.add(1, id="j")
            eventually(lambda: gate.started)
            worker.role.stop()
            gate.open()

        results = 1 if producer.get_result("j") == "done" else 0
    found = results, client.zcard(key(queue, "delayed")), len(dead_letters(client, queue))
    assert found == {"result": (1, 0, 0), "retry": (0, 1, 0), "dead letter": (0, 0, 1)}[outcome]
    assert pending(client, queue) == []


def test_jobs_taken_but_not_started_are_released_at_once_and_burn_no_attempt(
    url: str, client: redis.Redis, queue: str
) -> None:
    held, other = Gate(), Gate(is_open=True)
    options = {"claim_min_idle_ms": STALE_AFTER_MS, "max_attempts": 1}
    with Producer(url, queue=queue) as producer, working(url, queue, held, concurrency=1, **options) as worker:
        ids = producer.add_bulk(range(5))
        eventually(lambda: len(pending(client, queue)) == 5)
        with working(url, queue, other, **options):
            worker.role.stop()
            stopped = time.monotonic()
            eventually(lambda: len(other.finished) == 4)
            took = time.monotonic() - stopped
            held.open()
            worker.join()
            eventually(lambda: nothing_left(client, queue))

    assert took < 2.0
    assert held.finished == ids[:1]
    assert sorted(other.finished) == sorted(ids[1:])
    assert dead_letters(client, queue) == []


def test_a_released_job_has_the_count_of_deliveries_that_it_came_with(
    url: str, client: redis.Redis, queue: str
) -> None:
    gate, stream = Gate(), key(queue, "stream")
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(2))
        client.xgroup_create(stream, "default", 0)
        client.xreadgroup("default", "dead", {stream: ">"})
        entries = [entry_id for entry_id, _ in client.xrange(stream)]
        client.xclaim(stream, "default", "dead", 0, entries, idle=60_000, retrycount=7, justid=True)
        producer.add("fresh")

        with working(url, queue, gate, concurrency=1, max_attempts=25) as worker:
            eventually(lambda: gate.started and len(pending(client, queue)) == 3)
            worker.role.stop()
            eventually(lambda: [n for _, _, n in pending(client, queue)] == [8, 7, 0], within=3)
            gate.open()


def test_a_job_whose_delivery_the_stop_cut_off_is_released_as_well(
    server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    other = Gate(is_open=True)
    options = {"claim_min_idle_ms": STALE_AFTER_MS, "max_attempts": 1}
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        with working(proxy.url, queue, print, block_ms=5_000, **options) as worker:
            eventually(lambda: proxy.counts["XREADGROUP"])
            proxy.on("XREADGROUP", act=Act(after=lambda: time.sleep(1)))  # the reply is on its way while we stop
            eventually(lambda: proxy.counts["XREADGROUP"] >= 2)
            producer.add(1, id="j")
            eventually(lambda: pending(client, queue))
            worker.stop()
        with working(server.url, queue, other, **options):
            eventually(lambda: other.finished == ["j"], within=2)

    assert dead_letters(client, queue) == []


# The deadline


async def stuck(_: Any) -> None:
    _started.set()
    await asyncio.sleep(60)


def stuck_in_thread(_: Any) -> None:
    _started.set()
    _released.wait(20)


async def clings(_: Any) -> None:
    _started.set()
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(4)  # tidying up that takes its time


_started, _released = threading.Event(), threading.Event()


@pytest.mark.parametrize("handler", [stuck, stuck_in_thread, clings])
def test_run_returns_within_the_deadline_with_a_handler_that_is(
    url: str, client: redis.Redis, queue: str, handler: Any
) -> None:
    _started.clear()
    _released.clear()
    with (
        Producer(url, queue=queue) as producer,
        working(url, queue, handler, shutdown_deadline_secs=1) as worker,
    ):
        producer.add(1, id="j")
        assert _started.wait(20)  # a job that is only delivered would go back at once
        asked = time.monotonic()
        worker.stop()
        took = time.monotonic() - asked
        _released.set()

    assert 0.9 < took < 2.5
    assert len(pending(client, queue)) == 1  # for others to take over
    assert dead_letters(client, queue) == []


def test_a_deadline_of_zero_gives_up_at_once(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer, working(url, queue, stuck, shutdown_deadline_secs=0) as worker:
        producer.add(1)
        eventually(lambda: pending(client, queue))

        worker.stop(within=2)


def test_run_returns_within_the_deadline_when_the_server_is_gone(start_like: StartLike, queue: str) -> None:
    server = start_like()
    gate = Gate()
    with Producer(server.url, queue=queue) as producer:
        worker = working(server.url, queue, gate, shutdown_deadline_secs=2, run_scheduler=True)
        producer.add_bulk(range(3))
        eventually(lambda: len(gate.started) == 3)
        server.kill()
        gate.open()
        asked = time.monotonic()
        worker.stop()

    assert time.monotonic() - asked < 4


def test_an_idle_worker_stops_at_once_however_long_its_reads_are(url: str, queue: str) -> None:
    with quiet_joined(url, queue, print, block_ms=60_000) as worker:
        asked = time.monotonic()
        worker.stop()

    assert time.monotonic() - asked < 1


# Who may stop it, and when


def test_a_stop_before_the_run_makes_it_return_at_once(url: str, queue: str) -> None:
    ran: list[Any] = []
    consumer = Consumer(url, queue=queue, **QUICK)
    with Producer(url, queue=queue) as producer:
        producer.add(1)
        consumer.stop()

        Running(consumer, ran.append).join(within=3)

    assert ran == []


def test_a_stop_from_a_handler_ends_the_run_and_settles_the_job(url: str, client: redis.Redis, queue: str) -> None:
    consumer = Consumer(url, queue=queue, **QUICK)
    with Producer(url, queue=queue) as producer:
        producer.add(1)

        Running(consumer, lambda _: consumer.stop()).join(within=5)

    assert nothing_left(client, queue)


def test_many_stops_are_as_good_as_one(url: str, queue: str) -> None:
    with quiet_joined(url, queue, print) as worker:
        for _ in range(5):
            worker.role.stop()
        worker.join()
        worker.role.stop()


def test_a_stop_while_the_server_is_not_there_ends_the_run() -> None:
    worker = Running(Consumer("redis://127.0.0.1:1/0", queue="q", **QUICK), print)

    worker.stop(within=5)


def test_a_cancelled_run_ends_and_leaves_no_task_behind(url: str, client: redis.Redis, queue: str) -> None:
    async def main() -> int:
        consumer = Consumer(url, queue=queue, **QUICK)
        task = asyncio.create_task(consumer.run(stuck))
        await until(lambda: consumer.healthy)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(main()) == 0


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_a_process(url: str, client: redis.Redis, queue: str, number: signal.Signals) -> None:
    journal = Journal(client, queue)
    options = {"concurrency": 1, "claim_min_idle_ms": STALE_AFTER_MS}
    with Producer(url, queue=queue) as producer, Process("sleep", url, queue, **options) as process:
        ids = producer.add_bulk([0.3, 0.3, 0.3])
        eventually(lambda: journal.count("start") == 1 and len(pending(client, queue)) == 3)
        process.signal(number)

        assert process.wait() == 0
    assert journal.lines() == [("start", ids[0]), ("end", ids[0]), ("returned", "")]
    assert [count for _, _, count in pending(client, queue)] == [0, 0]  # released, unburned


@pytest.mark.parametrize("handler", ["sleep", "sleep_in_thread"])
def test_a_second_signal_aborts_a_process(url: str, client: redis.Redis, queue: str, handler: str) -> None:
    journal = Journal(client, queue)
    with Producer(url, queue=queue) as producer, Process(handler, url, queue, shutdown_deadline_secs=60) as process:
        producer.add(30)
        eventually(lambda: journal.count("start") == 1)
        process.signal(signal.SIGTERM)
        time.sleep(0.2)  # signals that are pending together count as one
        process.signal(signal.SIGTERM)
        asked = time.monotonic()
        process.wait(within=4)

    assert time.monotonic() - asked < 3
    assert journal.count("end") == 0


def test_a_process_whose_thread_is_stuck_ends_soon_after_its_deadline(
    url: str, client: redis.Redis, queue: str
) -> None:
    journal = Journal(client, queue)
    options = {"shutdown_deadline_secs": 1}
    with Producer(url, queue=queue) as producer, Process("sleep_in_thread", url, queue, **options) as process:
        producer.add(30)
        eventually(lambda: journal.count("start") == 1)
        process.signal(signal.SIGTERM)

        process.wait(within=4)


def test_run_sync_outside_the_main_thread_leaves_signals_alone(url: str, client: redis.Redis, queue: str) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    seen: list[int] = []
    consumer = Consumer(url, queue=queue, **QUICK)
    thread = threading.Thread(target=consumer.run_sync, args=[lambda job: seen.append(job.payload)])
    thread.start()
    with Producer(url, queue=queue) as producer:
        producer.add(1)
        eventually(lambda: seen == [1])
    consumer.stop()
    thread.join(5)

    assert not thread.is_alive()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# Under load


def test_workers_that_come_and_go_under_load_lose_and_double_nothing(url: str, client: redis.Redis, queue: str) -> None:
    ran: list[str] = []

    async def handler(job: Any) -> None:
        await asyncio.sleep(0.002)
        ran.append(job.id)

    options = {"claim_min_idle_ms": STALE_AFTER_MS, "max_attempts": 1, "concurrency": 3, "batch": 20}
    with Producer(url, queue=queue) as producer:
        ids = producer.add_bulk(range(400))
        stopped = 0
        while not nothing_left(client, queue):
            with working(url, queue, handler, **options):
                before = len(ran)
                eventually(lambda b=before: len(ran) >= b + 40 or nothing_left(client, queue))
            stopped += 1

    assert stopped > 3
    assert sorted(ran) == sorted(ids)
    assert dead_letters(client, queue) == []
