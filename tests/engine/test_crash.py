"""Workers that are killed: their jobs run again elsewhere, in time and not before, and a job that kills is stopped."""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import pytest
import redis

from chasqui import Producer, RetryOverride
from chasqui.embedded import EmbeddedServer
from tests.engine.seen import key
from tests.engine.worker_proxy import script_proxy
from tests.engine.worker_tools import Gate, Journal, Process, dead_letters, nothing_left, pending, working
from tests.proxy import kill, kill_after
from tests.support import eventually

IDLE_MS = 1_500


def test_a_killed_workers_job_runs_again_elsewhere_after_claim_min_idle_and_not_before(
    url: str, client: redis.Redis, queue: str
) -> None:
    journal, other = Journal(client, queue), Gate(is_open=True)
    options, stream = {"claim_min_idle_ms": IDLE_MS}, key(queue, "stream")
    with Producer(url, queue=queue) as producer, Process("sleep", url, queue, **options) as process:
        ids = producer.add_bulk([60, 60])
        eventually(lambda: journal.count("start") == 2)
        with working(url, queue, other, **options):
            time.sleep(2 * IDLE_MS / 1000)  # it lives, and renews: nobody takes its jobs
            assert other.started == []
            process.signal(signal.SIGKILL)
            process.wait()
            killed = time.monotonic()
            renewed_ms = max(p["time_since_delivered"] for p in client.xpending_range(stream, "default", "-", "+", 9))
            eventually(lambda: len(other.finished) == 2, every=0.005)
            took_ms = (time.monotonic() - killed) * 1000
            eventually(lambda: nothing_left(client, queue))

    assert IDLE_MS - renewed_ms - 5 <= took_ms < IDLE_MS - renewed_ms + 5_000
    assert sorted(other.finished) == sorted(ids)


@pytest.mark.parametrize("own", [True, False], ids=["the job's own", "the queue's"])
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_crash_loop_gets_exactly_max_attempts_starts_and_then_it_is_a_dead_letter(
    url: str, client: redis.Redis, queue: str, max_attempts: int, own: bool
) -> None:
    journal = Journal(client, queue)
    options = {"claim_min_idle_ms": 100, "max_attempts": 25 if own else max_attempts}
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", name="deadly", retry=RetryOverride(max_attempts) if own else None)
        for _ in range(max_attempts):
            with Process("kill", url, queue, **options) as process:
                assert process.wait() == -signal.SIGKILL
        with Process("kill", url, queue, **options):
            eventually(lambda: dead_letters(client, queue))

    (letter,) = dead_letters(client, queue)
    assert journal.lines() == [("start", "j")] * max_attempts
    assert (letter["reason"], letter["n"]) == (b"retries_exhausted", b"deadly")
    assert nothing_left(client, queue)


def test_a_job_beside_one_that_kills_its_worker_is_done_all_the_same(url: str, client: redis.Redis, queue: str) -> None:
    ran: list[str] = []
    journal = Journal(client, queue)
    options = {"claim_min_idle_ms": 200, "max_attempts": 2, "concurrency": 1}
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="deadly")
        with Process("kill", url, queue, **options) as process:
            process.wait()
        producer.add(1, id="good")

        with working(url, queue, lambda job: ran.append(job.id), **options):
            eventually(lambda: nothing_left(client, queue))

    assert journal.lines() == [("start", "deadly")]
    assert sorted(ran) == ["deadly", "good"]


@pytest.mark.parametrize("own", [True, False], ids=["the jobs' own", "the queue's"])
@pytest.mark.parametrize("concurrency", [1, 20])
def test_a_job_that_kills_its_worker_takes_no_neighbour_with_it(
    url: str, client: redis.Redis, queue: str, concurrency: int, own: bool
) -> None:
    journal = Journal(client, queue)
    options = {"claim_min_idle_ms": 150, "max_attempts": 25 if own else 3, "concurrency": concurrency}
    rules = RetryOverride(3) if own else None
    with Producer(url, queue=queue) as producer:
        good = producer.add_bulk([0.05] * 20, retry=rules)
        producer.add(1, id="deadly", name="deadly", retry=rules)
        good += producer.add_bulk([0.05] * 20, retry=rules)
        for _ in range(3):
            with Process("kill_by_name", url, queue, **options) as process:
                assert process.wait(30) == -signal.SIGKILL
        with Process("kill_by_name", url, queue, **options):
            eventually(lambda: nothing_left(client, queue), within=30)

    lines = journal.lines()
    assert [letter["n"] for letter in dead_letters(client, queue)] == [b"deadly"]
    assert lines.count(("start", "deadly")) == 3
    assert {job_id for word, job_id in lines if word == "end"} == set(good)


def test_a_job_on_its_last_run_that_takes_long_does_not_keep_the_others_waiting(
    url: str, client: redis.Redis, queue: str
) -> None:
    journal = Journal(client, queue)
    options = {"claim_min_idle_ms": 300, "max_attempts": 2, "concurrency": 5}
    with Producer(url, queue=queue) as producer:
        slow = producer.add_bulk([30, 30, 30])
        with Process("sleep", url, queue, **options) as process:
            eventually(lambda: journal.count("start") == 3)
            process.signal(signal.SIGKILL)
            process.wait()
        with Process("sleep", url, queue, **options):
            began: list[float] = []

            def another_started() -> bool:
                if journal.count("start") > 3 + len(began):
                    began.append(time.monotonic())
                return len(began) == 3

            eventually(another_started, within=20, every=0.005)
            new = producer.add(0, id="new")  # what is on its first run waits for none of them
            eventually(lambda: ("end", new) in journal.lines())

    assert sorted(journal.lines()[3:6]) == sorted(("start", job_id) for job_id in slow)
    assert all(later - sooner > 0.2 for sooner, later in itertools.pairwise(began))


# Killed at the very moment of settling


@pytest.mark.parametrize(
    ("script", "carried_out", "runs"),
    [
        ("ack_delete", True, 1),
        ("ack_delete", False, 2),
    ],
    ids=["after the ack", "before the ack"],
)
def test_a_worker_killed_around_its_ack_leaves_the_job_done_or_pending(
    server: EmbeddedServer, client: redis.Redis, queue: str, script: str, carried_out: bool, runs: int
) -> None:
    journal = Journal(client, queue)
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        with Process("note", proxy.url, queue, claim_min_idle_ms=200) as process:
            proxy.on(script, act=(kill_after if carried_out else kill)(process.pid))
            producer.add(1, id="j")
            assert process.wait() == -signal.SIGKILL
        assert len(pending(client, queue)) == runs - 1

        with working(server.url, queue, lambda job: journal.write("again", job.id), claim_min_idle_ms=200):
            eventually(lambda: nothing_left(client, queue))

    assert [job_id for _, job_id in journal.lines()] == ["j"] * runs


def test_workers_killed_again_and_again_under_load_lose_no_job(url: str, client: redis.Redis, queue: str) -> None:
    journal = Journal(client, queue)
    done: list[str] = []

    def handler(job: Any) -> None:
        done.append(job.id)

    options = {"claim_min_idle_ms": 300, "max_attempts": 25, "concurrency": 5, "batch": 10}
    with Producer(url, queue=queue) as producer:
        ids = producer.add_bulk([0.02] * 200)
        for n in range(1, 4):
            with Process("sleep", url, queue, **options) as process:
                eventually(lambda n=n: journal.count("end") >= 20 * n)
                process.signal(signal.SIGKILL)
        with working(url, queue, handler, **options):
            eventually(lambda: nothing_left(client, queue))

    finished = [job_id for word, job_id in journal.lines() if word == "end"] + done
    assert set(finished) == set(ids)
    # Only what was in the hands of the killed may have run twice: five handlers and the acks on their way, each time.
    assert len(finished) - len(ids) <= 3 * 20
    assert dead_letters(client, queue) == []
    assert client.xlen(key(queue, "stream")) == 0
