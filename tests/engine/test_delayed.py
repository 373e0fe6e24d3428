"""Jobs for later: when they run, how long their ids are taken, and taking them out again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from chasqui import NewJob, RetryOverride
from chasqui.protocol.codec import encode_member
from tests.engine.conftest import Connect
from tests.engine.seen import Seen, ids, in_delayed, in_stream, key, keys_of, payloads

HOUR_S, DAY_S = 3600, 24 * 3600


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def promote(client: redis.Redis, queue: str) -> None:
    """What a promoter does, as far as a producer can tell: the members leave the set, the ids stay taken."""
    for job in in_delayed(client, queue):
        client.delete(key(queue, f"didx:{job.id}"))
    client.delete(key(queue, "delayed"))


# When


@pytest.mark.parametrize(
    "delay", [60_000, timedelta(minutes=1), timedelta(seconds=59, microseconds=1_000_999)], ids=str
)
def test_add_in_schedules_that_much_later(producer: Any, client: redis.Redis, queue: str, delay: Any) -> None:
    made = producer.add_in(delay, {"d": 1}, name="x", retry=RetryOverride(2))

    [job] = in_delayed(client, queue)
    assert job == Seen(made, "x", {"d": 1}, job.created_at_ms, 0, RetryOverride(2), job.created_at_ms + 60_000)
    assert abs(job.created_at_ms - now_ms()) < 5000
    assert keys_of(client, queue) == [key(queue, "delayed")]


@pytest.mark.parametrize(
    ("when", "at"),
    [
        (datetime(2026, 12, 1, 12, 30, 0, 123_999), 1796128200123),  # noqa: DTZ001
        (datetime(2026, 12, 1, 12, 30, tzinfo=UTC), 1796128200000),
        (datetime(2026, 12, 1, 12, 30, tzinfo=timezone(timedelta(hours=-5))), 1796146200000),
        (1796128200123, 1796128200123),
    ],
    ids=str,
)
def test_add_at_schedules_for_that_moment_and_naive_ones_are_utc(
    connect: Connect, url: str, client: redis.Redis, queue: str, when: Any, at: int
) -> None:
    producer = connect(url, queue=queue, max_delay_secs=0)

    producer.add_at(when, 1)
    producer.add_at(when, 2, id="i", name="n")

    assert {(job.payload, job.name, job.at) for job in in_delayed(client, queue)} == {(1, "", at), (2, "n", at)}


def test_a_delay_of_nothing_and_a_time_in_the_past_mean_now(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(0, 0)
    producer.add_in(timedelta(0), 1, id="i")
    producer.add_in(timedelta(microseconds=999), 2)
    producer.add_at(now_ms() - 1, 3)
    producer.add_at(datetime(1971, 1, 1, tzinfo=UTC), 4, id="j")
    producer.add_at(0, 5)
    producer.add_in_bulk(0, [6, 7])
    producer.add_in_bulk(0, [8], ids=["k"])
    producer.add_bulk_jobs([NewJob(9, delay_ms=0)])

    assert payloads(in_stream(client, queue)) == list(range(10))
    assert in_delayed(client, queue) == []
    assert not client.keys(key(queue, "didx:*"))


def test_one_millisecond_is_a_delay(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(1, 0)

    assert payloads(in_delayed(client, queue)) == [0]


def test_a_delayed_bulk_has_one_moment_and_the_order_of_the_call(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    made = producer.add_in_bulk(timedelta(minutes=1), range(250), name="n", retry=RetryOverride(1))

    jobs = in_delayed(client, queue)
    assert {job.id: job.payload for job in jobs} == dict(zip(made, range(250), strict=True))
    assert {(job.at, job.name, job.retry) for job in jobs} == {(jobs[0].created_at_ms + 60_000, "n", RetryOverride(1))}


def test_a_delayed_bulk_takes_ids(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(60_000, "first", id="b")

    made = producer.add_in_bulk(60_000, [1, 2, 3], ids=["a", "b", "c"])

    assert made == ["a", "b", "c"]
    assert {job.id: job.payload for job in in_delayed(client, queue)} == {"a": 1, "b": "first", "c": 3}


def test_a_delayed_bulk_makes_ids_where_none_is_given(producer: Any, client: redis.Redis, queue: str) -> None:
    made = producer.add_in_bulk(60_000, [1, 2], ids=["a", None])

    assert {job.id: job.payload for job in in_delayed(client, queue)} == {"a": 1, made[1]: 2}
    assert len(made[1]) == 26


# Ids


def test_a_delayed_id_leaves_marker_and_index_of_the_same_life(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(600_000, {"d": 1}, id="job-d1", name="x")

    [member] = client.zrange(producer.delayed_key, 0, -1)
    assert keys_of(client, queue) == [key(queue, k) for k in ("delayed", "didx:job-d1", "dlid:job-d1")]
    assert client.get(key(queue, "dlid:job-d1")) == b"1"
    assert client.get(key(queue, "didx:job-d1")) == member
    assert member == encode_member(b"x", member[5:])
    assert client.ttl(key(queue, "didx:job-d1")) == client.ttl(key(queue, "dlid:job-d1"))


@pytest.mark.parametrize(
    ("dedup_ttl", "delay_ms", "ttl_s"),
    [
        ("24h", 60_000, DAY_S),
        ("24h", 30 * DAY_S * 1000, 30 * DAY_S + HOUR_S),
        ("1s", 1, 1 + HOUR_S),
        ("1s", 1999, 1 + HOUR_S),
        ("1s", 600_000, 600 + HOUR_S),
        ("1500ms", 600_000, 600 + HOUR_S),
        ("2h", 600_000, 2 * HOUR_S),
    ],
)
def test_a_delayed_id_is_taken_for_dedup_ttl_and_an_hour_past_its_moment_at_least(
    connect: Connect, url: str, client: redis.Redis, queue: str, dedup_ttl: str, delay_ms: int, ttl_s: int
) -> None:
    producer = connect(url, queue=queue, dedup_ttl=dedup_ttl)

    producer.add_in(delay_ms, 1, id="i")
    producer.add_in_bulk(delay_ms, [1], ids=["j"])

    for name in ("dlid:i", "didx:i", "dlid:j", "didx:j"):
        assert ttl_s - 10 <= client.ttl(key(queue, name)) <= ttl_s


def test_dedup_ttl_is_rounded_up_to_seconds(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    connect(url, queue=queue, dedup_ttl="1500ms").add(1, id="i")

    assert 1000 < client.pttl(key(queue, "dlid:i")) <= 2000


def test_a_delayed_id_stays_taken_after_promotion(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(60_000, 1, id="i")
    promote(client, queue)

    producer.add_in(60_000, 2, id="i")
    producer.add(3, id="i")

    assert in_delayed(client, queue) + in_stream(client, queue) == []


# Cancel


def test_cancel_takes_the_job_out_once_and_frees_its_id(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(60_000, 1, id="i")
    producer.add_in(60_000, 2, id="j")

    answers = [producer.cancel_delayed("i"), producer.cancel_delayed("i")]
    left = payloads(in_delayed(client, queue))
    producer.add_in(60_000, 3, id="i")

    assert answers == [True, False]
    assert left == [2]
    assert sorted(payloads(in_delayed(client, queue))) == [2, 3]


def test_after_a_cancel_the_id_can_be_added_at_once(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(60_000, 1, id="i")
    producer.cancel_delayed("i")

    producer.add(2, id="i")

    assert payloads(in_stream(client, queue)) == [2]


def test_cancel_after_promotion_is_false(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in(60_000, 1, id="i")
    promote(client, queue)

    assert producer.cancel_delayed("i") is False
    assert client.exists(key(queue, "dlid:i"))


def test_cancel_with_an_index_left_behind_by_promotion_is_false_and_keeps_the_id_taken(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    producer.add_in(60_000, 1, id="i")
    client.delete(producer.delayed_key)

    assert producer.cancel_delayed("i") is False
    assert client.exists(key(queue, "dlid:i"), key(queue, "didx:i")) == 2


def test_cancel_of_what_was_never_delayed_is_false(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add(1, id="now")
    made = producer.add_in(60_000, 2)

    assert producer.cancel_delayed_bulk(["now", made, "unknown"]) == [False, False, False]
    assert ids(in_delayed(client, queue)) == [made]
    assert ids(in_stream(client, queue)) == ["now"]


def test_a_bulk_of_cancels_answers_in_order(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_in_bulk(60_000, range(10), ids=[f"i-{n}" for n in range(10)])
    asked = ["i-7", "no", "i-2", "i-7", "i-0", "no"]

    assert producer.cancel_delayed_bulk(asked) == [True, False, True, False, True, False]
    assert sorted(payloads(in_delayed(client, queue))) == [1, 3, 4, 5, 6, 8, 9]


def test_two_cancels_at_once_take_each_job_once(connect: Connect, url: str, queue: str) -> None:
    one, other = connect(url, queue=queue), connect(url, queue=queue)
    names = [f"i-{n}" for n in range(100)]
    one.add_in_bulk(60_000, range(100), ids=names)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda producer: producer.cancel_delayed_bulk(names), [one, other]))

    assert [sum(pair) for pair in zip(*answers, strict=True)] == [1] * 100
