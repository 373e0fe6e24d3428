"""Batch handlers, and tables of handlers by name."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis

from chasqui import InMemorySink, NewJob, Producer, RetryLater, Router, UnrecoverableError, batch
from tests.engine.seen import an_envelope, in_delayed, key
from tests.engine.worker_tools import (
    dead_letters,
    event_names,
    events,
    nothing_left,
    pending,
    steal_until_renewed,
    until,
    working,
)
from tests.support import eventually

# Batch handlers


def test_a_batch_handler_gets_at_most_max_jobs_and_every_job_once(url: str, client: redis.Redis, queue: str) -> None:
    sizes: list[int] = []
    seen: list[int] = []

    @batch(max_jobs=7, max_wait_ms=5)
    async def handler(jobs: list[Any]) -> None:
        sizes.append(len(jobs))
        seen.extend(job.payload for job in jobs)

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(100))
        with working(url, queue, handler, concurrency=7):
            eventually(lambda: nothing_left(client, queue))

    assert max(sizes) == 7
    assert sorted(seen) == list(range(100))


def test_a_batch_that_is_full_does_not_wait(url: str, client: redis.Redis, queue: str) -> None:
    sizes: list[int] = []

    @batch(max_jobs=5, max_wait_ms=60_000)
    async def handler(jobs: list[Any]) -> None:
        sizes.append(len(jobs))

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(10))
        with working(url, queue, handler):
            eventually(lambda: nothing_left(client, queue), within=5)

    assert sizes == [5, 5]


def test_a_job_that_is_taken_over_while_its_batch_waits_is_not_started(
    url: str, client: redis.Redis, queue: str
) -> None:
    seen: list[str] = []

    @batch(max_jobs=3, max_wait_ms=60_000)
    async def handler(jobs: list[Any]) -> None:
        seen.extend(job.id for job in jobs)

    options = {"claim_min_idle_ms": 1_000, "concurrency": 3}
    with Producer(url, queue=queue) as producer, working(url, queue, handler, **options):
        producer.add_bulk_jobs([NewJob(1, id="held"), NewJob(1, id="lost")])
        eventually(lambda: len(pending(client, queue)) == 2)
        held, lost = (entry for entry, _, _ in pending(client, queue))
        steal_until_renewed(client, queue, lost, held)
        steal_until_renewed(client, queue, lost, held)
        producer.add(1, id="last")
        eventually(lambda: seen)

    assert seen == ["held", "last"]


def test_a_batch_waits_for_max_wait_and_then_starts_with_what_is_there(
    url: str, client: redis.Redis, queue: str
) -> None:
    took: list[float] = []

    @batch(max_jobs=100, max_wait_ms=300)
    async def handler(jobs: list[Any]) -> None:
        took.append(time.monotonic() - added)
        assert len(jobs) == 3

    with Producer(url, queue=queue) as producer, working(url, queue, handler, concurrency=100):
        added = time.monotonic()
        producer.add_bulk(range(3))
        eventually(lambda: took and nothing_left(client, queue))

    assert 0.25 <= took[0] < 5
    assert dead_letters(client, queue) == []


def test_a_batch_larger_than_concurrency_and_read_is_filled(url: str, client: redis.Redis, queue: str) -> None:
    sizes: list[int] = []

    @batch(max_jobs=50, max_wait_ms=10_000)
    async def handler(jobs: list[Any]) -> None:
        sizes.append(len(jobs))

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(100))
        with working(url, queue, handler, concurrency=1, batch=10):
            eventually(lambda: nothing_left(client, queue), within=5)

    assert sizes == [50, 50]


def test_as_many_batches_run_as_concurrency_holds(url: str, client: redis.Redis, queue: str) -> None:
    running, most = 0, 0
    go_on = threading.Event()

    @batch(max_jobs=2, max_wait_ms=0)
    async def handler(jobs: list[Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await until(go_on.is_set)
        running -= 1

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(20))
        with working(url, queue, handler, concurrency=6):
            eventually(lambda: running == 3)
            go_on.set()
            eventually(lambda: nothing_left(client, queue))

    assert most == 3


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_each_job_of_a_batch_has_its_own_outcome(url: str, client: redis.Redis, queue: str, kind: str) -> None:
    outcomes = {
        "ok": {"r": 1},
        "none": None,
        "again": ValueError("boom"),
        "later": RetryLater(3_600_000),
        "never": UnrecoverableError("no"),
    }

    def answer(jobs: list[Any]) -> list[Any]:
        return [outcomes[job.id] for job in jobs]

    async def in_coroutine(jobs: list[Any]) -> list[Any]:
        return answer(jobs)

    handler = batch(max_jobs=10, max_wait_ms=50)(in_coroutine if kind == "coroutine" else answer)
    with Producer(url, queue=queue) as producer:
        for name in outcomes:
            producer.add(1, id=name)
        with working(url, queue, handler, store_results=True, delayed_enabled=False):
            eventually(lambda: client.xlen(key(queue, "stream")) == 0 and pending(client, queue) == [])
        results = producer.get_result_bulk(list(outcomes))
        (letter,) = producer.peek_dlq()

    assert results == [{"r": 1}, None, None, None, None]
    assert [job.id for job in in_delayed(client, queue)] == ["again", "later"]
    assert letter.job is not None
    assert (letter.job.id, letter.reason, letter.error) == ("never", "unrecoverable", "UnrecoverableError: no")
    assert event_names(client, queue, "ok") == ["active", "completed"]
    assert event_names(client, queue, "again") == ["active", "failed", "retry-scheduled"]
    assert event_names(client, queue, "never") == ["active", "failed", "dlq"]


def test_a_batch_that_raises_fails_all_its_jobs(url: str, client: redis.Redis, queue: str) -> None:
    sink = InMemorySink()

    @batch(max_jobs=4, max_wait_ms=50)
    async def handler(_: list[Any]) -> None:
        raise ValueError("boom")

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(4), name="x")
        with working(url, queue, handler, max_attempts=1, metrics=sink):
            eventually(lambda: len(dead_letters(client, queue)) == 4)

    assert {letter["error"].splitlines()[0] for letter in dead_letters(client, queue)} == {b"ValueError: boom"}
    assert sink.failed == {"x": 4}


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([], b"0 outcomes for 2 jobs"),
        ([1], b"1 outcomes for 2 jobs"),
        ([1, 2, 3], b"3 outcomes for 2 jobs"),
        (7, b"outcomes for 2 jobs"),
    ],
    ids=["none", "too few", "too many", "no list"],
)
def test_a_batch_whose_answer_has_the_wrong_length_fails_all_its_jobs(
    url: str, client: redis.Redis, queue: str, returned: Any, complaint: bytes
) -> None:
    handler = batch(max_jobs=2, max_wait_ms=1000)(lambda _: returned)
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(2))
        with working(url, queue, handler, max_attempts=1, store_results=True):
            eventually(lambda: len(dead_letters(client, queue)) == 2)

    assert all(complaint in letter["error"] for letter in dead_letters(client, queue))


def test_a_job_of_a_batch_that_cannot_be_read_fails_alone(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[list[str]] = []

    @batch(max_jobs=3, max_wait_ms=100)
    async def handler(jobs: list[Any]) -> None:
        seen.append([job.id for job in jobs])

    bad = bytes.fromhex("94a170c401c1cf000001a1ed1399a200")
    for data in (an_envelope("a", 1), bad, an_envelope("b", 2)):
        client.xadd(key(queue, "stream"), {"d": data})
    with working(url, queue, handler, max_attempts=1):
        eventually(lambda: nothing_left(client, queue))

    assert seen == [["a", "b"]]
    assert [letter["d"] for letter in dead_letters(client, queue)] == [bad]


def test_a_result_of_a_batch_that_cannot_be_stored_fails_that_job_alone(
    url: str, client: redis.Redis, queue: str
) -> None:
    handler = batch(max_jobs=2, max_wait_ms=1000)(lambda jobs: [{1, 2} if job.id == "bad" else 1 for job in jobs])
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="bad")
        producer.add(1, id="good")
        with working(url, queue, handler, max_attempts=1, store_results=True):
            eventually(lambda: dead_letters(client, queue) and nothing_left(client, queue))

        assert producer.get_result_bulk(["bad", "good"]) == [None, 1]
    assert len(dead_letters(client, queue)) == 1


def test_a_batch_that_still_waits_for_more_starts_at_once_when_the_worker_is_stopped(
    url: str, client: redis.Redis, queue: str
) -> None:
    seen: list[str] = []
    handler = batch(max_jobs=10, max_wait_ms=60_000)(lambda jobs: seen.extend(job.id for job in jobs))
    with Producer(url, queue=queue) as producer, working(url, queue, handler) as worker:
        producer.add(1, id="j")
        eventually(lambda: pending(client, queue))
        worker.stop(within=4)
        left = pending(client, queue)

    # Either it was run, or it was given back unrun: never kept, never both.
    assert seen == ["j"] if left == [] else ([deliveries for _, _, deliveries in left], seen) == ([0], [])


# Tables by name


def test_a_router_gives_each_name_to_its_handler_and_the_rest_to_the_default(
    url: str, client: redis.Redis, queue: str
) -> None:
    seen: list[tuple[str, str]] = []

    async def welcome(job: Any) -> None:
        seen.append(("welcome", job.name))

    router = Router(default=lambda job: seen.append(("default", job.name)))
    router.on("welcome", welcome).on("größe", lambda job: seen.append(("größe", job.name)))
    with Producer(url, queue=queue) as producer:
        producer.add_bulk_named([("welcome", 1), ("größe", 2), ("other", 3), ("", 4)])
        with working(url, queue, router):
            eventually(lambda: nothing_left(client, queue))

    assert sorted(seen) == [("default", ""), ("default", "other"), ("größe", "größe"), ("welcome", "welcome")]


def test_an_unknown_name_is_a_failed_run_by_default(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", name="nobody")
        with working(url, queue, Router().on("known", print), max_attempts=2):
            eventually(lambda: dead_letters(client, queue))

    (letter,) = dead_letters(client, queue)
    assert letter["reason"] == b"retries_exhausted"
    assert b": no handler for the name 'nobody'" in letter["error"]
    assert event_names(client, queue, "j").count("failed") == 2


def test_an_unknown_name_is_a_dead_letter_at_once_where_asked_for(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", name="nobody")
        with working(url, queue, Router().on("known", print), unknown_name="dlq"):
            eventually(lambda: dead_letters(client, queue))

    (letter,) = dead_letters(client, queue)
    assert (letter["reason"], letter["n"]) == (b"unrecoverable", b"nobody")
    assert b": no handler for the name 'nobody'" in letter["error"]
    assert [e["reason"] for e in events(client, queue) if e["e"] == "dlq"] == ["unrecoverable"]
