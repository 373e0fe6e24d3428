"""The original's worker runs what our producer added."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from chasqui import Backoff, NewJob, Producer, RetryOverride
from tests.interop.conftest import NativeWorker
from tests.support import eventually

StartWorker = Callable[..., NativeWorker]
QUICK = Backoff.fixed(5, jitter_ms=0)


def seen(runs: list[dict[str, Any]]) -> set[tuple[str, str, str, int]]:
    return {(run["id"], run["name"], repr(run["data"]), run["attempt"]) for run in runs}


def is_drained(client: redis.Redis, producer: Producer) -> bool:
    return client.xlen(producer.stream_key) == 0 and client.zcard(producer.delayed_key) == 0


def test_it_runs_immediate_jobs_of_every_shape(
    native_worker: StartWorker, producer: Producer, client: redis.Redis
) -> None:
    payloads: list[Any] = [
        None,
        False,
        0,
        -5,
        2**63,
        1.5,
        "",
        "ñandú 🦙",
        [],
        {},
        {"a": {"b": [1, None]}},
        "x" * 70_000,
    ]
    names = ["", "send-email", "ñ" * 128, "🦙" * 64]
    expected = set()
    for i, payload in enumerate(payloads):
        name = names[i % len(names)]
        made = producer.add(payload, name=name, id=f"id-{i} ñ" if i % 2 else None)
        expected.add((made, name, repr(payload), 0))

    worker = native_worker()

    assert seen(worker.wait_for_runs(len(payloads))) == expected
    eventually(lambda: is_drained(client, producer))
    assert producer.stats().dlq == 0


def test_it_sees_the_time_of_the_add(native_worker: StartWorker, producer: Producer) -> None:
    before = datetime.now(UTC)

    producer.add(1)

    [run] = native_worker().wait_for_runs(1)
    created = datetime.fromtimestamp(run["created_at_ms"] / 1000, UTC)
    assert timedelta(milliseconds=-1) <= created - before < timedelta(seconds=30)


def test_it_runs_bulks(native_worker: StartWorker, producer: Producer, client: redis.Redis) -> None:
    plain = producer.add_bulk(range(300), name="bulk")
    named = producer.add_bulk_named([("ñ", 300), ("", 301), ("b", 302)])
    with_retry = producer.add_bulk(["r"], retry=RetryOverride(1, Backoff.exponential(5)))

    worker = native_worker()

    expected = {(made, "bulk", repr(n), 0) for n, made in enumerate(plain)}
    expected |= {(named[0], "ñ", "300", 0), (named[1], "", "301", 0), (named[2], "b", "302", 0)}
    expected |= {(with_retry[0], "", "'r'", 0)}
    assert seen(worker.wait_for_runs(len(expected))) == expected
    eventually(lambda: is_drained(client, producer))
    assert len(worker.runs) == len(expected)


def test_it_promotes_and_runs_delayed_jobs(native_worker: StartWorker, producer: Producer, client: redis.Redis) -> None:
    worker = native_worker()
    made = [
        producer.add_in(50, "in", name="ñ"),
        producer.add_in(timedelta(milliseconds=60), "in with id", id="i"),
        producer.add_at(datetime.now(UTC) + timedelta(milliseconds=70), "at", name="at"),
        *producer.add_in_bulk(80, ["bulk", "bulk"], name="b"),
        *producer.add_in_bulk(90, ["bulk with id"], ids=["j"]),
    ]

    runs = worker.wait_for_runs(len(made))

    assert seen(runs) == {
        (made[0], "ñ", "'in'", 0),
        ("i", "", "'in with id'", 0),
        (made[2], "at", "'at'", 0),
        (made[3], "b", "'bulk'", 0),
        (made[4], "b", "'bulk'", 0),
        ("j", "", "'bulk with id'", 0),
    }
    eventually(lambda: is_drained(client, producer))


def test_it_runs_a_bulk_of_mixed_jobs(native_worker: StartWorker, producer: Producer, client: redis.Redis) -> None:
    made = producer.add_bulk_jobs(
        [NewJob(0, id="zero", name="a"), NewJob(1), NewJob(2, id="two", delay_ms=50), NewJob(3, delay_ms=60, name="d")]
    )
    without_ids = producer.add_bulk_jobs([NewJob(4), NewJob(5, delay_ms=50, name="e")])

    runs = native_worker().wait_for_runs(6)

    assert seen(runs) == {
        ("zero", "a", "0", 0),
        (made[1], "", "1", 0),
        ("two", "", "2", 0),
        (made[3], "d", "3", 0),
        (without_ids[0], "", "4", 0),
        (without_ids[1], "e", "5", 0),
    }
    eventually(lambda: is_drained(client, producer))


@pytest.mark.parametrize("way", ["now", "bulk", "delayed", "with id"])
def test_a_jobs_own_budget_of_attempts_is_honoured(
    native_worker: StartWorker, producer: Producer, client: redis.Redis, way: str
) -> None:
    worker = native_worker(max_attempts=25)
    payload, retry = {"fail_until": 99}, RetryOverride(3, QUICK)
    made = {
        "now": lambda: producer.add(payload, name="f", retry=retry),
        "bulk": lambda: producer.add_bulk([payload], name="f", retry=retry)[0],
        "delayed": lambda: producer.add_in(20, payload, name="f", retry=retry),
        "with id": lambda: producer.add(payload, name="f", retry=retry, id="i"),
    }[way]()

    # The worker tells of its runs through a pipe, so what it told may arrive after what it did.
    eventually(lambda: client.xlen(producer.dlq_key) == 1 and len(worker.runs) >= 3, within=20)

    assert [(run["id"], run["name"], run["attempt"]) for run in worker.runs] == [(made, "f", n) for n in range(3)]
    [letter] = producer.peek_dlq()
    assert (letter.reason, letter.name, letter.error) == ("retries_exhausted", "f", None)
    assert letter.job
    assert (letter.job.id, letter.job.payload, letter.job.retry) == (made, payload, retry)


def test_a_budget_above_the_workers_own_is_honoured_and_the_job_can_still_succeed(
    native_worker: StartWorker, producer: Producer, client: redis.Redis
) -> None:
    worker = native_worker(max_attempts=1)
    backoff = Backoff.exponential(2, multiplier=1.5, max_delay_ms=10, jitter_ms=1)

    producer.add({"fail_until": 4}, retry=RetryOverride(5, backoff))

    assert [run["attempt"] for run in worker.wait_for_runs(5)] == [0, 1, 2, 3, 4]
    eventually(lambda: is_drained(client, producer))
    assert producer.stats().dlq == 0


def test_no_attempts_means_a_dead_letter_unrun(
    native_worker: StartWorker, producer: Producer, client: redis.Redis
) -> None:
    worker = native_worker()

    producer.add(1, retry=RetryOverride(0))

    eventually(lambda: client.xlen(producer.dlq_key) == 1)
    assert worker.runs == []


def test_its_results_are_read_by_our_producer(native_worker: StartWorker, producer: Producer) -> None:
    native_worker(store_results=True)
    value = {"r": [1, "ñ", None, 2.5]}

    made = producer.add(value)
    other = producer.add(0)

    assert producer.wait_for_result(made, 20) == value
    assert producer.wait_for_result(other, 20) == 0
    assert producer.get_result(made) == value
    assert producer.get_result_bulk([other, "unknown", made]) == [0, None, value]


def test_its_dead_letters_are_seen_replayed_and_run_again(
    native_worker: StartWorker, producer: Producer, client: redis.Redis
) -> None:
    worker = native_worker()
    retry = RetryOverride(2, QUICK)
    given_up = producer.add({"give_up": True}, name="ñ")
    failed = producer.add({"fail_until": 99}, id="i", retry=retry)
    eventually(lambda: client.xlen(producer.dlq_key) == 2, within=20)
    before = len(worker.runs)

    letters = {letter.reason: letter for letter in producer.peek_dlq()}
    moved = producer.replay_dlq()

    assert {reason: letter.job.id for reason, letter in letters.items() if letter.job} == {
        "unrecoverable": given_up,
        "retries_exhausted": failed,
    }
    assert letters["unrecoverable"].name == "ñ"
    assert moved == 2
    eventually(lambda: len(worker.runs) == before + 3 and client.xlen(producer.dlq_key) == 2, within=20)
    assert sorted((run["id"], run["attempt"]) for run in worker.runs[before:]) == sorted(
        [(given_up, 0), (failed, 0), (failed, 1)]
    )


def test_bytes_that_are_no_job_become_dead_letters_that_do_not_block_a_replay(
    native_worker: StartWorker, producer: Producer, client: redis.Redis
) -> None:
    worker = native_worker()
    client.xadd(producer.stream_key, {"d": b"\xc1 no job"})
    client.xadd(producer.stream_key, {"other": "field"})
    eventually(lambda: client.xlen(producer.dlq_key) == 2)
    made = producer.add({"fail_until": 1}, retry=RetryOverride(1))
    eventually(lambda: client.xlen(producer.dlq_key) == 3)

    moved = producer.replay_dlq(limit=1)

    assert moved == 1
    assert [(run["id"], run["attempt"]) for run in worker.wait_for_runs(2)] == [(made, 0), (made, 0)]
    assert {letter.reason for letter in producer.peek_dlq() if letter.job is None} == {"decode_failed", "malformed"}
