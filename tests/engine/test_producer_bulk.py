"""Adding many jobs in one call, and what an add does when the stream is full."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui import Backoff, NewJob, QueueFull, RetryOverride
from tests.engine.conftest import Connect
from tests.engine.seen import ids, in_delayed, in_stream, key, keys_of, payloads
from tests.support import eventually

SEVERAL = 2500  # more than are sent at a time


def test_a_bulk_keeps_the_order_and_returns_the_ids_in_it(producer: Any, client: redis.Redis, queue: str) -> None:
    made = producer.add_bulk(range(SEVERAL), name="n", retry=RetryOverride(3))

    jobs = in_stream(client, queue)
    assert ids(jobs) == made
    assert payloads(jobs) == list(range(SEVERAL))
    assert {(job.name, job.attempt, job.retry) for job in jobs} == {("n", 0, RetryOverride(3))}
    assert len(set(made)) == SEVERAL


def test_a_bulk_writes_what_single_adds_write(producer: Any, client: redis.Redis, queue: str) -> None:
    sizes = [0, 1, 255, 256, 65_535, 65_536]
    for name, retry in (("", None), ("ñ", None), ("x", RetryOverride(1, Backoff.exponential(5)))):
        client.delete(producer.stream_key)
        producer.add_bulk([b"x" * size for size in sizes], name=name, retry=retry)
        bulk = in_stream(client, queue)
        client.delete(producer.stream_key)

        for size in sizes:
            producer.add(b"x" * size, name=name, retry=retry)

        single = in_stream(client, queue)
        assert [(j.name, j.payload, j.attempt, j.retry) for j in bulk] == [
            (j.name, j.payload, j.attempt, j.retry) for j in single
        ]


def test_any_iterable_is_a_bulk(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_bulk(n for n in range(3))
    producer.add_bulk((3, 4))

    assert payloads(in_stream(client, queue)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("call", ["add_bulk", "add_bulk_named", "add_bulk_jobs"])
def test_an_empty_bulk_writes_nothing(producer: Any, client: redis.Redis, queue: str, call: str) -> None:
    assert getattr(producer, call)([]) == []

    assert keys_of(client, queue) == []


def test_empty_lists_need_no_server(connect: Connect) -> None:
    producer = connect("redis://127.0.0.1:1/0", queue="q")

    assert producer.add_bulk([]) == []
    assert producer.add_in_bulk(5, []) == []
    assert producer.cancel_delayed_bulk([]) == []
    assert producer.get_result_bulk([]) == []


def test_a_named_bulk_gives_each_job_its_name(producer: Any, client: redis.Redis, queue: str) -> None:
    items = [("b1", 1), ("", 2), ("ñ" * 128, 3), ("b1", 4)] * 60

    made = producer.add_bulk_named(items)

    jobs = in_stream(client, queue)
    assert [(job.name, job.payload) for job in jobs] == items
    assert ids(jobs) == made


def test_a_bulk_of_jobs_gives_each_its_own_everything(producer: Any, client: redis.Redis, queue: str) -> None:
    now = time.time_ns() // 1_000_000
    retry = RetryOverride(2, Backoff.fixed(9))
    made = producer.add_bulk_jobs(
        [
            NewJob(0, id="zero", name="a"),
            NewJob(1, id="one", retry=retry),
            NewJob(2, id="two", delay_ms=60_000, name="b"),
            NewJob(3, id="three", run_at_ms=now + 90_000, retry=retry),
            NewJob(4, name="c"),
            NewJob(5, delay_ms=120_000),
            NewJob(6, id="six", delay_ms=0),
            NewJob(7, id="seven", run_at_ms=now - 1),
        ]
    )

    stream, delayed = in_stream(client, queue), in_delayed(client, queue)
    assert [(j.payload, j.name, j.retry) for j in stream] == [
        (0, "a", None),
        (1, "", retry),
        (4, "c", None),
        (6, "", None),
        (7, "", None),
    ]
    assert [(j.payload, j.name, j.retry) for j in delayed] == [(2, "b", None), (3, "", retry), (5, "", None)]
    assert delayed[1].at == now + 90_000
    assert made == ["zero", "one", "two", "three", stream[2].id, delayed[2].id, "six", "seven"]


def test_a_bulk_of_jobs_without_ids_keeps_the_order_of_both_kinds(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    jobs = [NewJob(n, name=str(n), delay_ms=60_000 + n if n % 3 == 0 else None) for n in range(SEVERAL)]

    made = producer.add_bulk_jobs(jobs)

    stream, delayed = in_stream(client, queue), in_delayed(client, queue)
    assert payloads(stream) == [n for n in range(SEVERAL) if n % 3]
    assert payloads(delayed) == [n for n in range(SEVERAL) if n % 3 == 0]
    assert {job.payload: (job.id, job.name) for job in stream + delayed} == {
        n: (made[n], str(n)) for n in range(SEVERAL)
    }


def test_a_bulk_of_ids_larger_than_one_call_adds_each_once(producer: Any, client: redis.Redis, queue: str) -> None:
    jobs = [NewJob(n, id=f"i-{n % 600}") for n in range(700)]

    made = producer.add_bulk_jobs(jobs)

    assert made == [job.id for job in jobs]
    assert payloads(in_stream(client, queue)) == list(range(600))


def test_a_bulk_of_large_jobs_is_split_by_size(producer: Any, client: redis.Redis, queue: str) -> None:
    large = [b"x" * 400_000 + bytes([n]) for n in range(8)]

    producer.add_bulk(large)
    producer.add_bulk_jobs([NewJob(payload, id=str(n)) for n, payload in enumerate(large)])

    assert payloads(in_stream(client, queue)) == large * 2


def test_a_bulk_without_ids_leaves_no_other_key(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_bulk([1, 2])
    producer.add_in_bulk(60_000, [3])

    assert keys_of(client, queue) == [key(queue, "delayed"), key(queue, "stream")]


def test_a_bulk_of_jobs_remembers_the_ids_it_was_given_longer_than_those_it_made(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    _, made = producer.add_bulk_jobs([NewJob(1, id="i"), NewJob(2)])

    assert client.ttl(key(queue, "dlid:i")) > 23 * 3600
    assert 0 < client.ttl(key(queue, f"dlid:{made}")) <= 600


# Overflow

ADDS: list[tuple[str, Callable[[Any], Any]]] = [
    ("add", lambda producer: producer.add(0)),
    ("add with id", lambda producer: producer.add(0, id="i")),
    ("add_bulk", lambda producer: producer.add_bulk(range(SEVERAL))),
    ("add_bulk_named", lambda producer: producer.add_bulk_named([("n", 0)] * SEVERAL)),
    ("add_bulk_jobs", lambda producer: producer.add_bulk_jobs([NewJob(0), NewJob(0, delay_ms=5000)])),
    ("with ids", lambda producer: producer.add_bulk_jobs([NewJob(0, id="i", delay_ms=5000), NewJob(0, id="j")])),
]
each_add = pytest.mark.parametrize("add", [pytest.param(call, id=name) for name, call in ADDS])


def tries(client: redis.Redis) -> int:
    """How often an add has looked for room: single ones do so in their script."""
    stats = client.info("commandstats")
    return sum(int(stats[name]["calls"]) for name in ("cmdstat_evalsha", "cmdstat_xlen") if name in stats)


@each_add
def test_reject_refuses_at_nine_tenths_of_the_cap_and_adds_nothing(
    connect: Connect, url: str, client: redis.Redis, queue: str, add: Callable[[Any], Any]
) -> None:
    producer = connect(url, queue=queue, max_stream_len=20)
    producer.add_bulk(range(17))
    producer.add(17)
    before = keys_of(client, queue)

    with pytest.raises(QueueFull, match="nothing was added") as caught:
        add(producer)

    assert caught.value.code == "CMQ-301"
    assert queue in str(caught.value)
    assert payloads(in_stream(client, queue)) == list(range(18))
    assert keys_of(client, queue) == before


@each_add
def test_one_bulk_may_overshoot_the_cap(
    connect: Connect, url: str, client: redis.Redis, queue: str, add: Callable[[Any], Any]
) -> None:
    producer = connect(url, queue=queue, max_stream_len=20)
    producer.add_bulk(range(17))

    add(producer)

    assert client.xlen(producer.stream_key) > 17


def test_delayed_jobs_are_not_held_by_a_full_stream(
    connect: Connect, url: str, client: redis.Redis, queue: str
) -> None:
    producer = connect(url, queue=queue, max_stream_len=1)
    producer.add(0)

    producer.add_in(60_000, 1)
    producer.add_in(60_000, 2, id="i")
    producer.add_in_bulk(60_000, [3])
    producer.add_bulk_jobs([NewJob(4, delay_ms=60_000), NewJob(5, id="j", delay_ms=60_000)])

    assert sorted(payloads(in_delayed(client, queue))) == [1, 2, 3, 4, 5]


def test_a_full_queue_does_not_refuse_an_id_that_is_in_already(connect: Connect, url: str, queue: str) -> None:
    producer = connect(url, queue=queue, max_stream_len=1)
    producer.add(0, id="i")

    assert producer.add(0, id="i") == "i"


def test_a_cap_of_one_still_takes_one_job(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    producer = connect(url, queue=queue, max_stream_len=1)
    producer.add(0)

    with pytest.raises(QueueFull):
        producer.add(1)

    assert payloads(in_stream(client, queue)) == [0]


@each_add
def test_block_adds_as_soon_as_there_is_room(
    connect: Connect, url: str, client: redis.Redis, queue: str, add: Callable[[Any], Any]
) -> None:
    producer = connect(url, queue=queue, max_stream_len=10, overflow="block", block_timeout="60s")
    producer.add_bulk(range(9))
    before = tries(client)
    waiting = threading.Thread(target=add, args=[producer])
    waiting.start()
    eventually(lambda: tries(client) >= before + 5)
    length = client.xlen(producer.stream_key)

    client.xtrim(producer.stream_key, maxlen=0, approximate=False)
    waiting.join(10)

    assert length == 9
    assert not waiting.is_alive()
    assert client.xlen(producer.stream_key) >= 1


@each_add
def test_block_gives_up_after_its_time(connect: Connect, url: str, queue: str, add: Callable[[Any], Any]) -> None:
    producer = connect(url, queue=queue, max_stream_len=10, overflow="block", block_timeout="120ms")
    producer.add_bulk(range(9))
    started = time.monotonic()

    with pytest.raises(QueueFull, match="120 ms"):
        add(producer)

    assert 0.1 < time.monotonic() - started < 5


@each_add
def test_trim_drops_the_oldest(
    connect: Connect, url: str, client: redis.Redis, queue: str, add: Callable[[Any], Any]
) -> None:
    producer = connect(url, queue=queue, max_stream_len=100, overflow="trim")
    for _ in range(5):
        producer.add_bulk(range(100))

    add(producer)
    add(producer)

    # MAXLEN ~ trims whole nodes only, of at most 100 entries.
    jobs = in_stream(client, queue)
    assert 100 <= len(jobs) <= 300
    assert jobs[-1].payload in (0, SEVERAL - 1)


def test_a_second_producer_with_a_higher_cap_is_not_refused(
    connect: Connect, url: str, client: redis.Redis, queue: str
) -> None:
    small, large = connect(url, queue=queue, max_stream_len=2), connect(url, queue=queue)
    small.add(0)
    with pytest.raises(QueueFull):
        small.add(1)

    large.add(1)

    assert payloads(in_stream(client, queue)) == [0, 1]
