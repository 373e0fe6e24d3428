"""Results of jobs, figures of a queue, pausing."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import msgpack
import pytest
import redis

from chasqui import DecodeError, ResultTimeout, Stats
from tests.engine.conftest import Connect
from tests.engine.seen import key, keys_of, put_dead_letter


def put_result(client: redis.Redis, queue: str, id: str, value: Any) -> None:
    client.set(key(queue, f"result:{id}"), msgpack.packb(value), ex=60)


@pytest.mark.parametrize("value", [{"r": 1}, False, 0, "", b"", [], "ñ", 1.5], ids=repr)
def test_a_stored_result_is_read_back(producer: Any, client: redis.Redis, queue: str, value: Any) -> None:
    put_result(client, queue, "i", value)

    assert producer.get_result("i") == value
    assert producer.wait_for_result("i") == value


def test_there_is_no_result_before_the_job_is_done(producer: Any, queue: str) -> None:
    producer.add(1, id="i")

    assert producer.get_result("i") is None


def test_results_come_in_the_order_asked_for(producer: Any, client: redis.Redis, queue: str) -> None:
    for n in range(3):
        put_result(client, queue, f"i-{n}", n)

    assert producer.get_result_bulk(["i-2", "no", "i-0", "i-2"]) == [2, None, 0, 2]


def test_raw_results_are_left_packed(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    put_result(client, queue, "i", {"r": 1})

    assert connect(url, queue=queue, raw=True).get_result("i") == b"\x81\xa1r\x01"


def test_a_result_that_is_no_messagepack_is_a_decode_error(producer: Any, client: redis.Redis, queue: str) -> None:
    client.set(key(queue, "result:i"), b"\xc1", ex=60)

    with pytest.raises(DecodeError):
        producer.get_result("i")
    with pytest.raises(DecodeError):
        producer.wait_for_result("i", 1)


def test_waiting_ends_when_the_result_comes(producer: Any, client: redis.Redis, queue: str) -> None:
    worker = threading.Timer(0.05, put_result, [client, queue, "i", {"r": 1}])
    worker.start()

    found = producer.wait_for_result("i", timeout=30)

    worker.join()
    assert found == {"r": 1}


def test_a_result_of_none_in_messagepack_ends_the_wait(producer: Any, client: redis.Redis, queue: str) -> None:
    put_result(client, queue, "i", None)

    assert producer.wait_for_result("i", timeout=5) is None


@pytest.mark.parametrize("timeout", [0.05, timedelta(milliseconds=50)], ids=str)
def test_waiting_in_vain_ends_in_time(producer: Any, timeout: Any) -> None:
    started = time.monotonic()

    with pytest.raises(ResultTimeout, match="'i'") as caught:
        producer.wait_for_result("i", timeout)

    assert isinstance(caught.value, TimeoutError)
    assert 0.05 <= time.monotonic() - started < 5


def test_stats_of_an_unused_queue_are_zero_and_make_no_key(producer: Any, client: redis.Redis, queue: str) -> None:
    assert producer.stats() == Stats(0, 0, 0, 0, 0, False)
    assert keys_of(client, queue) == []


def test_stats_count_each_place_where_jobs_are(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add_bulk(range(5))
    producer.add_in_bulk(60_000, range(3))
    put_dead_letter(client, queue, 1)
    put_dead_letter(client, queue, 2)

    found = producer.stats()

    assert (found.waiting, found.pending, found.delayed, found.dlq, found.paused) == (5, 0, 3, 2, False)


def test_stats_tell_jobs_in_work_from_waiting_ones_for_each_group(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    producer.add_bulk(range(5))
    client.xgroup_create(producer.stream_key, "default", "0")
    client.xgroup_create(producer.stream_key, "other", "0")
    client.xreadgroup("default", "c", {producer.stream_key: ">"}, count=2)

    default, other, unknown = producer.stats(), producer.stats(group="other"), producer.stats(group="unknown")

    assert (default.waiting, default.pending) == (3, 2)
    assert (other.waiting, other.pending) == (5, 0)
    assert (unknown.waiting, unknown.pending) == (5, 0)


def test_stats_tell_the_age_of_the_oldest_job_by_the_servers_clock(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    seconds, micros = client.time()
    client.xadd(producer.stream_key, {"d": "x"}, id=f"{seconds * 1000 + micros // 1000 - 60_000}-0")
    producer.add(1)

    assert 60_000 <= producer.stats().oldest_age_ms < 65_000


def test_a_job_from_the_future_has_no_negative_age(producer: Any, client: redis.Redis, queue: str) -> None:
    client.xadd(producer.stream_key, {"d": "x"}, id="99999999999999-0")

    assert producer.stats().oldest_age_ms == 0


@pytest.mark.parametrize(("score", "due_ms"), [("-inf", 0), ("+inf", 2**64), (1.5, 1), (1e300, 2**64)])
def test_a_score_that_is_no_time_is_shown_as_the_nearest_one(
    producer: Any, client: redis.Redis, queue: str, score: Any, due_ms: int
) -> None:
    client.zadd(key(queue, "delayed"), {b"member": score})

    assert producer.overview().next_due_ms == due_ms
    assert [job.run_at_ms for job in producer.list_delayed()] == [due_ms]


def test_pause_sets_a_key_and_resume_removes_it(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.pause()
    producer.pause()
    paused, there = producer.stats().paused, keys_of(client, queue)
    producer.resume()
    producer.resume()

    assert paused is True
    assert there == [key(queue, "paused")]
    assert producer.stats().paused is False
    assert keys_of(client, queue) == []


def test_adding_goes_on_while_paused(producer: Any, queue: str) -> None:
    producer.pause()

    producer.add(1)
    producer.add_bulk([2])

    assert producer.stats().waiting == 2
