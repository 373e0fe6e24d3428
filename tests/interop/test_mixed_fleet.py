"""Our workers and the original's on one queue: each job is done once, and everybody reads what the others wrote."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from chasqui import Backoff, Producer, QueueEvents, RetryOverride, UnrecoverableError
from tests.engine.seen import in_delayed, key
from tests.engine.worker_tools import Journal, Process, consumers, dead_letters, event_names, nothing_left, working
from tests.interop.conftest import NativeWorker
from tests.support import eventually

StartWorker = Callable[..., NativeWorker]
NativeQueue = Callable[..., list[Any]]

EVENTS_SCRIPT = str(Path(__file__).with_name("worker_native_events.py"))
QUICK = Backoff.fixed(5, jitter_ms=0)
SHARED = {"group": "default", "claim_min_idle_ms": 30_000}


class Obedient:
    """Does what the job's payload asks for, as the handler of the native worker does."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.runs: list[dict[str, Any]] = []
        self._pause_s = pause_s

    async def __call__(self, job: Any) -> Any:
        self.runs.append({"id": job.id, "name": job.name, "data": job.payload, "attempt": job.attempt})
        await asyncio.sleep(self._pause_s)
        wishes = job.payload if isinstance(job.payload, dict) else {}
        if wishes.get("give_up"):
            raise UnrecoverableError("asked to give up")
        if job.attempt < wishes.get("fail_until", 0):
            raise ValueError("asked to fail")
        return job.payload


def done_ids(client: redis.Redis, queue: str) -> Counter[str]:
    found = client.xrange(key(queue, "events"))
    return Counter(fields[b"id"].decode() for _, fields in found if fields[b"e"] == b"completed")


# Native producer, our consumer


def test_our_consumer_runs_what_the_native_producer_added(
    native_queue: NativeQueue, client: redis.Redis, url: str, queue: str
) -> None:
    bulk = [{"name": name, "data": {"n": n}} for n, name in enumerate(["a", "ñ", "日本語", "x" * 256])]
    handler = Obedient()
    with working(url, queue, handler, store_results=True):
        answers = native_queue(
            ("add", ["now", {"a": [1, 2.5, None, "é"]}], {"job_id": "now"}),
            ("add", ["", None], {}),
            ("add", ["later", "x"], {"delay_ms": 50, "job_id": "later"}),
            ("add", ["later", "y"], {"delay_ms": 60}),
            ("add_bulk", [bulk], {}),
        )
        eventually(lambda: len(handler.runs) == 8 and nothing_left(client, queue))
        results = native_queue(("get_job_result", ["now"], {}), ("get_job_result", ["later"], {}))

    seen = {(run["name"], repr(run["data"])) for run in handler.runs}
    assert seen == {
        ("now", repr({"a": [1, 2.5, None, "é"]})),
        ("", "None"),
        ("later", "'x'"),
        ("later", "'y'"),
        *((one["name"], repr(one["data"])) for one in bulk),
    }
    assert {run["id"] for run in handler.runs} >= {answers[0]["id"], answers[1]["id"], "now", "later"}
    assert results == [{"a": [1, 2.5, None, "é"]}, "x"]


def test_our_consumer_honours_the_retry_rules_of_the_native_producer(
    native_queue: NativeQueue, client: redis.Redis, url: str, queue: str
) -> None:
    backoff = {"kind": "exponential", "delay_ms": 2, "multiplier": 3.0, "max_delay_ms": 5, "jitter_ms": 0}
    native_queue(
        ("add", ["f", {"fail_until": 99}], {"job_id": "thrice", "attempts": 3, "backoff": backoff}),
        ("add", ["f", {"fail_until": 1}], {"job_id": "twice", "attempts": 2, "backoff": 1}),
        ("add", ["f", {"give_up": True}], {"job_id": "never", "attempts": 9}),
        ("add", ["f", 1], {"job_id": "unrun", "attempts": 0}),
    )
    handler = Obedient()

    with working(url, queue, handler, max_attempts=1, retry_jitter_ms=100):
        eventually(lambda: len(dead_letters(client, queue)) == 3 and nothing_left(client, queue))
        letters = native_queue(("peek_dlq", [], {}))[0]

    assert Counter(run["id"] for run in handler.runs) == {"thrice": 3, "twice": 2, "never": 1}
    assert sorted(letter["reason"] for letter in letters) == ["retries_exhausted", "retries_exhausted", "unrecoverable"]
    waits = [
        int(fields[b"backoff_ms"])
        for _, fields in client.xrange(key(queue, "events"))
        if fields[b"e"] == b"retry-scheduled" and fields[b"id"] == b"thrice"
    ]
    assert waits == [2, 5]


def test_a_dead_letter_of_ours_is_seen_and_replayed_by_the_native_queue(
    native_queue: NativeQueue, client: redis.Redis, producer: Producer, url: str, queue: str
) -> None:
    producer.add({"give_up": True}, id="j", name="ñ")
    with working(url, queue, Obedient()):
        eventually(lambda: dead_letters(client, queue))
    source = dead_letters(client, queue)[0]["source_id"].decode()

    (letter,), replayed = native_queue(("peek_dlq", [], {}), ("replay_dlq", [], {}))

    assert (letter["source_id"], letter["reason"], letter["detail"], letter["name"]) == (
        source,
        "unrecoverable",
        None,
        "ñ",
    )
    assert replayed == 1
    assert client.xlen(key(queue, "stream")) == 1


def test_a_retry_of_ours_is_run_by_the_native_worker_and_the_other_way_round(
    native_worker: StartWorker, client: redis.Redis, producer: Producer, url: str, queue: str
) -> None:
    producer.add({"fail_until": 2}, id="j", name="ñ", retry=RetryOverride(3, Backoff.fixed(1, jitter_ms=0)))
    ours = Obedient()
    with working(url, queue, ours, delayed_enabled=False):
        eventually(lambda: in_delayed(client, queue))

    theirs = native_worker(delayed_enabled=True)
    theirs.wait_for_runs(2)

    eventually(lambda: nothing_left(client, queue))
    assert [(run["id"], run["name"], run["attempt"]) for run in [*ours.runs, *theirs.runs]] == [
        ("j", "ñ", 0),
        ("j", "ñ", 1),
        ("j", "ñ", 2),
    ]


# Both kinds of worker in one group


def test_each_of_five_hundred_jobs_is_done_once_by_a_mixed_fleet(
    native_worker: StartWorker,
    native_queue: NativeQueue,
    client: redis.Redis,
    producer: Producer,
    url: str,
    queue: str,
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"payload": {"k": 1}},
        "again": {"payload": {"fail_until": 1}, "retry": RetryOverride(5, QUICK)},
        "hopeless": {"payload": {"fail_until": 99}, "retry": RetryOverride(3, QUICK)},
        "never": {"payload": {"give_up": True}},
    }
    runs_of = {"plain": 1, "again": 2, "hopeless": 3, "never": 1}
    ours = Obedient(0.002)
    theirs = native_worker(concurrency=4, read_count=4, store_results=True, **SHARED)
    kind_of: dict[str, str] = {}
    with working(url, queue, ours, concurrency=4, batch=4, store_results=True, run_scheduler=True, **SHARED):
        for n in range(400):
            kind = list(kinds)[n % 4] if n % 3 == 0 else "plain"
            given = kinds[kind]
            how = {"id": f"ours-{n}", "name": kind, "retry": given.get("retry")}
            made = producer.add_in(20, given["payload"], **how) if n % 5 == 0 else producer.add(given["payload"], **how)
            kind_of[made] = kind
        calls = [
            ("add", ["plain", {"k": n}], {"job_id": f"its-{n}"} | ({"delay_ms": 20} if n % 2 else {}))
            for n in range(100)
        ]
        kind_of |= {made["id"]: "plain" for made in native_queue(*calls)}
        eventually(lambda: nothing_left(client, queue), within=40)
        eventually(lambda: len(ours.runs) + len(theirs.runs) >= sum(runs_of[k] for k in kind_of.values()), within=20)

    runs = Counter(run["id"] for run in [*ours.runs, *theirs.runs])
    assert runs == {made: runs_of[kind] for made, kind in kind_of.items()}
    assert min(len(ours.runs), len(theirs.runs)) > 20  # both had their share
    succeeded = sorted(made for made, kind in kind_of.items() if kind in ("plain", "again"))
    assert all(result is not None for result in producer.get_result_bulk(succeeded))
    letters = producer.peek_dlq(1000)
    assert Counter(letter.reason for letter in letters) == {
        "retries_exhausted": sum(kind == "hopeless" for kind in kind_of.values()),
        "unrecoverable": sum(kind == "never" for kind in kind_of.values()),
    }
    assert len({letter.job.id for letter in letters if letter.job}) == len(letters)
    assert done_ids(client, queue) == Counter(succeeded)


def test_events_of_both_kinds_are_read_alike_by_our_reader_and_the_native_one(
    native_worker: StartWorker, native_python: str, client: redis.Redis, producer: Producer, url: str, queue: str
) -> None:
    def work_through() -> None:
        producer.add({"k": 1}, name="ñ")
        producer.add({"fail_until": 1}, retry=RetryOverride(2, QUICK))
        producer.add({"give_up": True}, name="u")
        producer.add_in(5, 1, name="d")
        client.xadd(key(queue, "stream"), {"d": b"\xc1"})

    with working(url, queue, Obedient(), block_ms=50):
        work_through()
        eventually(lambda: "drained" in event_names(client, queue) and nothing_left(client, queue))
        eventually(lambda: event_names(client, queue).count("dlq") == 2)
    ours = Counter(event_names(client, queue))
    native = native_worker()
    work_through()
    native.wait_for_runs(5)
    eventually(lambda: nothing_left(client, queue) and Counter(event_names(client, queue))["dlq"] == 4)
    native.close()
    count = client.xlen(key(queue, "events"))

    with QueueEvents(url, queue=queue, start="0") as reader:
        by_us = [next(reader) for _ in range(count)]
    done = subprocess.run(
        [native_python, EVENTS_SCRIPT, url, queue, str(count)], capture_output=True, text=True, timeout=30, check=True
    )
    by_it = [json.loads(line) for line in done.stdout.splitlines()]

    assert [[e.name, e.job_id, e.job_name, {"ts": e.ts_ms, **e.fields}] for e in by_us] == by_it
    both = Counter(event.name for event in by_us)
    one_run = {name: n for name, n in ours.items() if name != "drained"}
    assert {name: n for name, n in both.items() if name != "drained"} == {name: 2 * n for name, n in one_run.items()}


def test_the_leases_of_both_kinds_of_promoter_exclude_each_other(
    native_worker: StartWorker, client: redis.Redis, producer: Producer, url: str, queue: str
) -> None:
    theirs = native_worker(consumer_id="native")
    eventually(lambda: client.get(key(queue, "promoter:lock")) == b"native")
    ours = Obedient()
    with working(url, queue, ours) as worker:
        added = producer.add_in_bulk(20, range(50))
        eventually(lambda: len(theirs.runs) + len(ours.runs) == 50)
        assert client.get(key(queue, "promoter:lock")) == b"native"

        theirs.close()
        eventually(lambda: client.get(key(queue, "promoter:lock")) == worker.role.consumer_id.encode())

    assert sorted(run["id"] for run in [*theirs.runs, *ours.runs]) == sorted(added)


def test_no_job_is_lost_when_a_worker_of_each_kind_is_killed_on_the_way(
    native_worker: StartWorker, client: redis.Redis, producer: Producer, url: str, queue: str
) -> None:
    journal = Journal(client, queue)
    options = {"claim_min_idle_ms": 500, "concurrency": 3, "max_attempts": 25}
    native = {**options, "read_count": 5}
    doomed, survivor = native_worker(**native), native_worker(**native)
    with (
        Process("sleep", url, queue, batch=5, **options) as killed,
        Process("sleep", url, queue, batch=5, **options),
    ):
        eventually(lambda: len(consumers(client, queue)) == 4)
        ids = producer.add_in_bulk(100, [0.01] * 100)

        def all_are_busy() -> bool:
            ids.extend(producer.add_bulk([0.01] * 20))
            return journal.count("end") >= 10 and len(doomed.runs) >= 10

        eventually(all_are_busy)
        killed.signal(signal.SIGKILL)
        doomed._process.kill()
        ids += producer.add_bulk([0.01] * 100)
        eventually(lambda: nothing_left(client, queue), within=30)

    done = {job_id for word, job_id in journal.lines() if word == "end"}
    assert done | {run["id"] for run in [*doomed.runs, *survivor.runs]} == set(ids)
    assert dead_letters(client, queue) == []
