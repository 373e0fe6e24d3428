"""Claims: kept while a job is held, taken over when its worker fell silent, and never stolen back."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import redis

from chasqui import InMemorySink, NoopSink, Producer, ReaderBatch, UnrecoverableError, batch
from chasqui.options import ConnectionOptions
from chasqui.protocol.consume import Member
from chasqui.protocol.keys import Keys
from chasqui.redis_io import Link
from tests.engine.seen import an_envelope, in_delayed, key
from tests.engine.worker_tools import (
    Gate,
    consumers,
    dead_letters,
    event_names,
    nothing_left,
    pending,
    quiet_joined,
    steal_until_renewed,
    until,
    working,
)
from tests.support import eventually

IDLE_MS = 900


def taken_by(client: redis.Redis, queue: str, name: str, *, idle_ms: int = 0, deliveries: int = 1) -> str:
    """A job in the hands of a worker of that name that has been silent for so long; returns its entry id."""
    stream = key(queue, "stream")
    entry_id = client.xadd(stream, {"d": an_envelope("j", 1)})
    client.xgroup_create(stream, "default", 0)
    client.xreadgroup("default", name, {stream: ">"})
    client.xclaim(stream, "default", name, 0, [entry_id], idle=idle_ms, retrycount=deliveries, justid=True)
    return str(entry_id.decode())


# Renewal


@pytest.mark.parametrize("kind", ["coroutine", "thread", "batch"])
def test_a_handler_longer_than_claim_min_idle_runs_once_beside_a_greedy_consumer(
    url: str, client: redis.Redis, queue: str, kind: str
) -> None:
    started: list[str] = []

    async def long(job: Any) -> None:
        started.append(job.id)
        await asyncio.sleep(3 * IDLE_MS / 1000)

    def long_in_thread(job: Any) -> None:
        started.append(job.id)
        time.sleep(3 * IDLE_MS / 1000)

    async def long_batch(jobs: list[Any]) -> None:
        await long(jobs[0])

    handlers = {"coroutine": long, "thread": long_in_thread, "batch": batch(max_jobs=1)(long_batch)}
    options = {"claim_min_idle_ms": IDLE_MS, "max_attempts": 25}
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")
        with (
            working(url, queue, handlers[kind], **options),
            working(url, queue, handlers[kind], **options),
        ):
            eventually(lambda: started and nothing_left(client, queue))

    assert started == ["j"]


def test_jobs_that_wait_for_a_slot_longer_than_claim_min_idle_run_once(
    url: str, client: redis.Redis, queue: str
) -> None:
    first, second = Gate(), Gate(is_open=True)
    options = {"claim_min_idle_ms": IDLE_MS, "concurrency": 1, "max_attempts": 25}
    with Producer(url, queue=queue) as producer:
        ids = producer.add_bulk(range(4))
        with working(url, queue, first, **options):
            eventually(lambda: len(pending(client, queue)) == 4)
            with working(url, queue, second, **options):
                time.sleep(3 * IDLE_MS / 1000)  # the others wait; nobody may take them
                first.open()
                eventually(lambda: nothing_left(client, queue))

    assert (first.finished, second.started) == (ids, [])


def test_a_renewed_claim_keeps_its_count_of_deliveries(url: str, client: redis.Redis, queue: str) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer, working(url, queue, gate, claim_min_idle_ms=100) as worker:
        producer.add(1)
        eventually(lambda: gate.started)
        time.sleep(0.3)

        (only,) = pending(client, queue)
        gate.open()

    assert only[1:] == (worker.role.consumer_id, 1)


# Taking over


def test_a_silent_workers_job_is_taken_over_after_claim_min_idle_and_not_before(
    url: str, client: redis.Redis, queue: str
) -> None:
    seen: list[float] = []
    taken_by(client, queue, "silent")
    since = time.monotonic()

    with working(url, queue, lambda _: seen.append(time.monotonic() - since), claim_min_idle_ms=700):
        eventually(lambda: seen)

    assert 0.65 <= seen[0] < 2.5


def test_a_job_taken_over_counts_as_reclaimed(url: str, client: redis.Redis, queue: str) -> None:
    sink = InMemorySink()
    taken_by(client, queue, "silent", idle_ms=60_000)

    with working(url, queue, print, metrics=sink):
        eventually(lambda: nothing_left(client, queue))

    assert (sink.read, sink.reclaimed) == (1, 1)


def test_a_job_whose_record_is_gone_is_dropped_from_the_pending_list(url: str, client: redis.Redis, queue: str) -> None:
    entry_id = taken_by(client, queue, "silent", idle_ms=60_000)
    client.xdel(key(queue, "stream"), entry_id)

    with quiet_joined(url, queue, print):
        eventually(lambda: pending(client, queue) == [])

    assert dead_letters(client, queue) == []


def test_many_jobs_of_a_dead_worker_are_all_taken_over_and_run_once(url: str, client: redis.Redis, queue: str) -> None:
    ran: list[str] = []
    with Producer(url, queue=queue) as producer:
        ids = producer.add_bulk(range(300))
    stream = key(queue, "stream")
    client.xgroup_create(stream, "default", 0)
    client.xreadgroup("default", "dead", {stream: ">"}, count=300)
    everything = [entry_id for entry_id, _ in client.xrange(stream)]
    client.xclaim(stream, "default", "dead", 0, everything, idle=60_000, justid=True)

    with working(url, queue, lambda job: ran.append(job.id)), working(url, queue, lambda job: ran.append(job.id)):
        eventually(lambda: nothing_left(client, queue))

    assert sorted(ran) == sorted(ids)


def test_no_more_than_a_thousand_jobs_are_taken_over_in_one_step(url: str, client: redis.Redis, queue: str) -> None:
    sizes: list[int] = []

    class Sink(NoopSink):
        def reader_batch(self, event: ReaderBatch) -> None:
            sizes.append(event.size)

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(1500))
    stream = key(queue, "stream")
    client.xgroup_create(stream, "default", 0)
    client.xreadgroup("default", "dead", {stream: ">"}, count=1500)
    everything = [entry_id for entry_id, _ in client.xrange(stream)]
    client.xclaim(stream, "default", "dead", 0, everything, idle=60_000, justid=True)

    with working(url, queue, lambda _: None, batch=5_000, events_enabled=False, metrics=Sink()):
        eventually(lambda: nothing_left(client, queue))

    assert sum(sizes) == 1500
    assert max(sizes) <= 1000  # a script stops the server while it runs


# Losing


@pytest.mark.parametrize("error", [ValueError("boom"), UnrecoverableError("no")], ids=["retry", "dead letter"])
def test_a_job_lost_to_another_worker_writes_neither_retry_nor_dead_letter(
    url: str, client: redis.Redis, queue: str, error: Exception
) -> None:
    async def robbed(job: Any) -> None:
        client.xclaim(key(queue, "stream"), "default", "thief", 0, [job.entry_id], justid=True)
        raise error

    with Producer(url, queue=queue) as producer, working(url, queue, robbed):
        producer.add(1, id="j")
        eventually(lambda: "drained" in event_names(client, queue))

    assert [(owner, count) for _, owner, count in pending(client, queue)] == [("thief", 1)]
    assert (in_delayed(client, queue), dead_letters(client, queue)) == ([], [])
    assert event_names(client, queue, "j") == ["active", "failed"]


def test_a_job_that_is_known_to_be_lost_says_so_and_writes_nothing(url: str, client: redis.Redis, queue: str) -> None:
    lost: list[bool] = []

    async def robbed(job: Any) -> None:
        client.xclaim(key(queue, "stream"), "default", "thief", 0, [job.entry_id], justid=True)
        deadline = time.monotonic() + 5
        await until(lambda: job.lost or time.monotonic() > deadline)
        lost.append(job.lost)
        raise ValueError("boom")

    with Producer(url, queue=queue) as producer, working(url, queue, robbed, claim_min_idle_ms=300):
        producer.add(1, id="j")
        eventually(lambda: lost)

    assert lost == [True]
    assert [owner for _, owner, _ in pending(client, queue)] == ["thief"]
    assert in_delayed(client, queue) == []


def test_a_job_lost_before_it_was_started_is_not_started(url: str, client: redis.Redis, queue: str) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer:
        first, second = producer.add_bulk(range(2))
        with working(url, queue, gate, concurrency=1, claim_min_idle_ms=IDLE_MS):
            eventually(lambda: gate.started == [first] and len(pending(client, queue)) == 2)
            held, last = (entry for entry, _, _ in pending(client, queue))
            # A renewal tells the worker. With the second one it has heard what the first one said.
            steal_until_renewed(client, queue, last, held)
            steal_until_renewed(client, queue, last, held)
            gate.open()
            eventually(lambda: len(pending(client, queue)) == 1)

    assert second not in gate.started


def test_a_worker_that_was_held_up_does_not_run_its_own_jobs_twice(url: str, client: redis.Redis, queue: str) -> None:
    started: list[str] = []

    async def rude(job: Any) -> None:
        """Holds up the event loop for longer than the claims live; nobody else is there to take over."""
        started.append(job.id)
        await asyncio.sleep(0)
        time.sleep(1.5 * IDLE_MS / 1000)  # noqa: ASYNC251 - this is the rudeness
        await asyncio.sleep(0.05)

    with Producer(url, queue=queue) as producer:
        ids = producer.add_bulk(range(3))
        with working(url, queue, rude, claim_min_idle_ms=IDLE_MS, concurrency=2, max_attempts=25):
            eventually(lambda: nothing_left(client, queue))

    assert sorted(started) == sorted(ids)


# Names of workers that are gone


def test_names_that_are_idle_and_have_nothing_pending_are_forgotten_and_others_stay(
    url: str, client: redis.Redis, queue: str
) -> None:
    stream = key(queue, "stream")
    taken_by(client, queue, "holds-a-job")
    client.xgroup_createconsumer(stream, "default", "gone")
    member = Member(Keys(queue), "default", "me")
    link = Link(ConnectionOptions(url=url))
    eventually(lambda: min(c["idle"] for c in client.xinfo_consumers(stream, "default")) >= 500)
    client.xgroup_createconsumer(stream, "default", "new")

    assert link.run(member.forget(24 * 3600 * 1000)) == []
    assert link.run(member.forget(500)) == ["gone"]

    link.close()
    assert consumers(client, queue) == ["holds-a-job", "new"]


def test_a_worker_forgets_nobody_who_was_there_within_the_day(url: str, client: redis.Redis, queue: str) -> None:
    taken_by(client, queue, "holds-a-job")
    client.xgroup_createconsumer(key(queue, "stream"), "default", "idle-for-a-moment")

    with quiet_joined(url, queue, print):
        assert {"holds-a-job", "idle-for-a-moment"} <= set(consumers(client, queue))


# Stream or group gone


@pytest.mark.parametrize(("concurrency", "full"), [(3, False), (1, True)], ids=["which has room", "which is full"])
def test_a_group_destroyed_while_running_is_made_again_and_work_resumes_in_a_worker(
    url: str, client: redis.Redis, queue: str, concurrency: int, full: bool
) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer, quiet_joined(url, queue, gate, concurrency=concurrency):
        ids = producer.add_bulk(range(4))
        eventually(lambda: len(pending(client, queue)) == 4)
        client.xgroup_destroy(key(queue, "stream"), "default")
        ids.append(producer.add("later"))
        if not full:
            eventually(lambda: client.xinfo_groups(key(queue, "stream")))

        gate.open()
        eventually(lambda: nothing_left(client, queue) and len(gate.finished) >= 5)

    assert sorted(gate.finished) == sorted(ids)  # once each: what we have is not taken a second time


def test_a_stream_deleted_while_running_is_made_again_and_work_resumes(
    url: str, client: redis.Redis, queue: str
) -> None:
    seen: list[Any] = []
    with Producer(url, queue=queue) as producer, quiet_joined(url, queue, lambda job: seen.append(job.payload)):
        producer.add(1)
        eventually(lambda: seen == [1] and nothing_left(client, queue))
        client.delete(key(queue, "stream"))
        producer.add(2)

        eventually(lambda: seen == [1, 2] and nothing_left(client, queue))


@pytest.mark.parametrize("outcome", ["done", "retry", "dead letter"])
def test_a_job_whose_stream_is_deleted_while_it_runs_does_not_hold_up_the_worker(
    url: str, client: redis.Redis, queue: str, outcome: str
) -> None:
    seen: list[str] = []
    go_on = threading.Event()

    async def handler(job: Any) -> None:
        seen.append(job.id)
        await until(go_on.is_set)
        if job.id == "first" and outcome != "done":
            raise ValueError("boom") if outcome == "retry" else UnrecoverableError("no")

    with Producer(url, queue=queue) as producer, working(url, queue, handler, concurrency=1):
        producer.add(1, id="first")
        eventually(lambda: seen)
        client.delete(key(queue, "stream"))
        go_on.set()
        producer.add(2, id="second")

        eventually(lambda: seen == ["first", "second"] and nothing_left(client, queue))
