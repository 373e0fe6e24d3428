"""The original's Queue and our Producer on one queue: each finds what the other wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from chasqui import Backoff, Producer, RetryOverride
from tests.engine.seen import ids, in_delayed, in_stream, key

NativeQueue = Callable[..., list[Any]]


def test_we_cancel_what_it_delayed(
    native_queue: NativeQueue, producer: Producer, client: redis.Redis, queue: str
) -> None:
    native_queue(("add", ["n", 1], {"delay_ms": 60_000, "job_id": "i"}), ("add", ["n", 2], {"delay_ms": 60_000}))

    assert producer.cancel_delayed_bulk(["i", "i", "unknown"]) == [True, False, False]
    assert [job.payload for job in in_delayed(client, queue)] == [2]


def test_it_cancels_what_we_delayed(
    native_queue: NativeQueue, producer: Producer, client: redis.Redis, queue: str
) -> None:
    producer.add_in(60_000, 1, id="i", name="ñ")
    producer.add_in_bulk(60_000, [2], ids=["j"])

    answers = native_queue(*(("cancel_delayed", [i], {}) for i in ("i", "i", "j", "unknown")))

    assert answers == [True, False, True, False]
    assert in_delayed(client, queue) == []
    assert not client.exists(key(queue, "dlid:i"), key(queue, "didx:i"))


def test_a_delayed_id_of_its_is_taken_for_us_and_of_ours_for_it(
    native_queue: NativeQueue, producer: Producer, client: redis.Redis, queue: str
) -> None:
    native_queue(("add", ["n", "its"], {"delay_ms": 60_000, "job_id": "i"}))
    producer.add_in(60_000, "ours", id="j")

    producer.add_in(60_000, "ours too", id="i")
    producer.add("ours too", id="i")
    native_queue(("add", ["n", "its too"], {"delay_ms": 60_000, "job_id": "j"}))

    assert {job.id: job.payload for job in in_delayed(client, queue)} == {"i": "its", "j": "ours"}
    assert in_stream(client, queue) == []


def test_both_write_the_same_bytes(
    native_queue: NativeQueue, producer: Producer, client: redis.Redis, url: str, queue: str
) -> None:
    backoff = {"kind": "exponential", "delay_ms": 100, "multiplier": 3.0, "max_delay_ms": 10_000, "jitter_ms": 0}
    native_queue(
        ("add", ["ñ", {"a": [1, 2.5, None]}], {"job_id": "job-4", "attempts": 7, "backoff": backoff}),
        ("add", ["x", {"d": 1}], {"job_id": "job-d", "delay_ms": 600_000}),
    )
    theirs, [their_member] = client.xrange(producer.stream_key), client.zrange(producer.delayed_key, 0, -1)
    their_ttls = [client.ttl(key(queue, name)) for name in ("dlid:job-d", "didx:job-d")]
    client.delete(*client.keys(key(queue, "*")))

    retry = RetryOverride(7, Backoff.exponential(100, multiplier=3, max_delay_ms=10_000, jitter_ms=0))
    with Producer(url, queue=queue, dedup_ttl="1s") as short:
        short.add({"a": [1, 2.5, None]}, id="job-4", name="ñ", retry=retry)
        short.add_in(600_000, {"d": 1}, id="job-d", name="x")

    ours, [our_member] = client.xrange(producer.stream_key), client.zrange(producer.delayed_key, 0, -1)
    [(_, their_fields)], [(_, our_fields)] = theirs, ours
    assert without_time(our_fields[b"d"]) == without_time(their_fields[b"d"])
    assert our_fields[b"n"] == their_fields[b"n"] == "ñ".encode()
    assert without_time(our_member) == without_time(their_member)
    our_ttls = [client.ttl(key(queue, name)) for name in ("dlid:job-d", "didx:job-d")]
    assert all(abs(our - their) <= 5 for our, their in zip(our_ttls, their_ttls, strict=True))


def without_time(envelope: bytes) -> bytes:
    """The bytes, with the nine of the creation time blanked: a 64-bit number of this year."""
    at = envelope.index(b"\xcf\x00\x00\x01")
    return envelope[:at] + b"?" * 9 + envelope[at + 9 :]


def test_it_reads_results_and_dead_letters_as_we_do(
    native_queue: NativeQueue, producer: Producer, client: redis.Redis, queue: str
) -> None:
    client.set(key(queue, "result:i"), b"\x81\xa1r\x01", ex=60)
    job = producer.add({"a": 1}, name="ñ", id="i")
    [(entry_id, fields)] = client.xrange(producer.stream_key)
    client.xadd(producer.dlq_key, {**fields, "source_id": entry_id, "reason": "unrecoverable", "detail": "d"})

    its_result, its_letters = native_queue(("get_job_result", ["i"], {}), ("peek_dlq", [], {}))

    [ours] = producer.peek_dlq()
    [its] = its_letters
    assert its_result == producer.get_result(job) == {"r": 1}
    named = (ours.dlq_id, ours.source_id, ours.reason, ours.detail, ours.name)
    assert (its["dlq_id"], its["source_id"], its["reason"], its["detail"], its["name"]) == named


def test_stats_count_jobs_of_both(native_queue: NativeQueue, producer: Producer, client: redis.Redis) -> None:
    native_queue(("add", ["n", 1], {}), ("add", ["n", 1], {"delay_ms": 60_000}))
    producer.add(1)
    producer.add_in(60_000, 1)

    found = producer.stats()

    assert (found.waiting, found.delayed) == (2, 2)


def test_its_replay_takes_our_dead_letters(
    native_queue: NativeQueue, producer: Producer, client: redis.Redis, queue: str
) -> None:
    made = producer.add({"a": 1}, retry=RetryOverride(2))
    [(entry_id, fields)] = client.xrange(producer.stream_key)
    client.xadd(producer.dlq_key, {**fields, "source_id": entry_id, "reason": "retries_exhausted", "error": "x"})
    client.xdel(producer.stream_key, entry_id)

    assert native_queue(("replay_dlq", [10], {})) == [1]
    assert ids(in_stream(client, queue)) == [made]
    assert in_stream(client, queue)[0].retry == RetryOverride(2)
