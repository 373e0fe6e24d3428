"""What a worker tells about its work: events in their exact form and order, and figures that cannot disturb a job."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis

from chasqui import (
    InMemorySink,
    JobOutcome,
    NoopSink,
    Producer,
    QueueEvents,
    ReaderBatch,
    RetryOverride,
    UnrecoverableError,
)
from chasqui.embedded import EmbeddedServer
from tests.engine.seen import key, keys_of
from tests.engine.worker_proxy import script_proxy
from tests.engine.worker_tools import Gate, dead_letters, event_names, events, nothing_left, quiet_joined, working
from tests.proxy import Act
from tests.support import eventually


def fail(job: Any) -> None:
    raise ValueError("boom")


# Events


def test_a_run_that_goes_well_is_told_in_the_exact_fields_and_order(url: str, client: redis.Redis, queue: str) -> None:
    before = int(time.time() * 1000)
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", name="ok")
        with working(url, queue, lambda _: time.sleep(0.01)):
            eventually(lambda: "completed" in event_names(client, queue))

    active, completed = [e for e in events(client, queue) if e["id"] == "j"]
    assert list(active) == ["e", "id", "ts", "n", "attempt"]
    assert list(completed) == ["e", "id", "ts", "n", "attempt", "duration_us"]
    assert (active["e"], active["id"], active["n"], active["attempt"]) == ("active", "j", "ok", "1")
    assert (completed["e"], completed["attempt"]) == ("completed", "1")
    assert before - 1000 <= int(active["ts"]) <= int(completed["ts"]) <= time.time() * 1000 + 1000
    assert 10_000 <= int(completed["duration_us"]) < 5_000_000


def test_an_unnamed_job_has_no_name_in_its_events(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")
        with working(url, queue, print):
            eventually(lambda: "completed" in event_names(client, queue))

    assert all("n" not in event for event in events(client, queue))


def test_a_job_that_fails_twice_is_told_in_the_exact_fields_and_order(
    url: str, client: redis.Redis, queue: str
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j", name="f", retry=RetryOverride(2))
        with working(url, queue, fail, retry_initial_backoff_ms=7):
            eventually(lambda: "dlq" in event_names(client, queue))

    told = [e for e in events(client, queue) if e["id"] == "j" and e["e"] != "waiting"]
    assert [(e["e"], e["attempt"]) for e in told] == [
        ("active", "1"),
        ("failed", "1"),
        ("retry-scheduled", "2"),
        ("active", "2"),
        ("failed", "2"),
        ("dlq", "2"),
    ]
    assert list(told[1]) == ["e", "id", "ts", "n", "attempt", "reason", "duration_us"]
    assert list(told[2]) == ["e", "id", "ts", "n", "attempt", "backoff_ms"]
    assert list(told[5]) == ["e", "id", "ts", "n", "attempt", "reason"]
    assert (told[1]["reason"], told[2]["backoff_ms"]) == ("boom", "7")
    assert told[5]["reason"] == "retries_exhausted"


def test_a_promoted_job_is_told_as_waiting_without_its_name(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_in(1, 1, id="j", name="x")
        with working(url, queue, print):
            eventually(lambda: "waiting" in event_names(client, queue))

    (waiting,) = [e for e in events(client, queue) if e["e"] == "waiting"]
    assert list(waiting) == ["e", "id", "ts"]
    assert waiting["id"] == "j"


def test_an_immediate_add_is_not_told(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")
        producer.add_in(60_000, 1, id="d")
        with working(url, queue, print):
            eventually(lambda: "drained" in event_names(client, queue))

    assert event_names(client, queue) == ["active", "completed", "drained"]


def test_drained_is_told_once_after_work_and_not_without(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer, quiet_joined(url, queue, print, block_ms=20):
        time.sleep(0.1)  # several empty reads
        assert not client.exists(key(queue, "events"))

        producer.add(1)
        eventually(lambda: "drained" in event_names(client, queue))
        time.sleep(0.1)  # several more

    (drained,) = [e for e in events(client, queue) if e["e"] == "drained"]
    assert list(drained) == ["e", "id", "ts"]
    assert drained["id"] == ""


def test_events_of_every_job_are_in_order_whatever_runs_beside_it(url: str, client: redis.Redis, queue: str) -> None:
    async def handler(job: Any) -> None:
        await asyncio.sleep(0)
        if job.payload % 3 == 1:
            fail(job)
        if job.payload % 3 == 2:
            raise UnrecoverableError("no")

    with Producer(url, queue=queue) as producer:
        ids = producer.add_bulk(range(300))
        with working(url, queue, handler, max_attempts=2, concurrency=50):
            eventually(lambda: nothing_left(client, queue))

    told: dict[str, list[str]] = {made: [] for made in ids}
    for event in events(client, queue):
        if event["e"] not in ("drained", "waiting"):
            told[event["id"]].append(event["e"])
    again = ["active", "failed", "retry-scheduled", "active", "failed", "dlq"]
    shapes = [["active", "completed"], again, ["active", "failed", "dlq"]]
    assert list(told.values()) == [shapes[n % 3] for n in range(300)]


def test_events_stay_in_order_when_the_worker_is_stopped_while_some_are_on_their_way(
    server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    gate = Gate()
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        proxy.on("XADD", act=Act(before=lambda: time.sleep(0.5)))
        with working(proxy.url, queue, gate, delayed_enabled=False) as worker:
            producer.add(1, id="j")
            eventually(lambda: gate.started)
            worker.role.stop()
            gate.open()
        eventually(lambda: client.xlen(key(queue, "events")) >= 2)

    assert event_names(client, queue, "j") == ["active", "completed"]


def test_the_events_of_a_worker_that_stops_are_all_written(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        ids = producer.add_bulk(range(500))
        with working(url, queue, lambda _: None, concurrency=20):
            eventually(lambda: nothing_left(client, queue))

    told = [event["id"] for event in events(client, queue) if event["e"] == "completed"]
    assert sorted(told) == sorted(ids)


def test_events_switched_off_create_no_key(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1)
        producer.add_in(1, 2)
        producer.add(1, name="f", retry=RetryOverride(2))
        with working(url, queue, lambda job: fail(job) if job.name else None, events_enabled=False):
            eventually(lambda: dead_letters(client, queue) and nothing_left(client, queue))

    assert key(queue, "events") not in keys_of(client, queue)


def test_events_are_trimmed_about_at_their_cap(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(500))
        with working(url, queue, lambda _: None, events_max_stream_len=100):
            eventually(lambda: nothing_left(client, queue))

    assert 100 <= client.xlen(key(queue, "events")) <= 300


def test_a_job_is_settled_although_its_events_cannot_be_written(url: str, client: redis.Redis, queue: str) -> None:
    client.set(key(queue, "events"), "mine", ex=60)
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(5))
        producer.add_in(1, 6)
        with working(url, queue, print):
            eventually(lambda: nothing_left(client, queue))

    assert client.get(key(queue, "events")) == b"mine"


def test_a_job_does_not_wait_for_its_events(server: EmbeddedServer, client: redis.Redis, queue: str) -> None:
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        proxy.on("XADD", act=Act(before=lambda: time.sleep(1.5)))
        with working(proxy.url, queue, print):
            producer.add(1)
            eventually(lambda: client.exists(key(queue, "stream")) and nothing_left(client, queue), within=1.2)


def test_our_own_reader_reads_what_the_worker_tells(url: str, queue: str) -> None:
    with Producer(url, queue=queue) as producer, QueueEvents(url, queue=queue) as reader:
        producer.add(1, id="j", name="mail")
        with working(url, queue, print):
            told = [next(reader) for _ in range(3)]

    assert [(event.name, event.job_id, event.job_name) for event in told] == [
        ("active", "j", "mail"),
        ("completed", "j", "mail"),
        ("drained", None, ""),
    ]


# Figures


def test_an_in_memory_sink_counts_what_happened(url: str, client: redis.Redis, queue: str) -> None:
    sink = InMemorySink()

    def handler(job: Any) -> None:
        if job.name == "bad":
            fail(job)

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(3), name="good")
        producer.add(1, name="bad", retry=RetryOverride(2))
        producer.add_in(1, 1, name="good")
        with working(url, queue, handler, metrics=sink):
            eventually(lambda: dead_letters(client, queue) and nothing_left(client, queue))
            eventually(lambda: sink.depth == 0)

    assert (sink.completed, sink.failed, sink.retried, sink.dead) == ({"good": 4}, {"bad": 2}, {"bad": 1}, {"bad": 1})
    assert (sink.reasons, sink.promoted, sink.read, sink.reclaimed) == ({"retries_exhausted": 1}, 2, 6, 0)
    assert sink.acquired == {"promoter": 1}


def test_a_sink_is_given_the_exact_figures(url: str, client: redis.Redis, queue: str) -> None:
    given: list[Any] = []

    class Sink(NoopSink):
        def reader_batch(self, event: Any) -> None:
            given.append(event)

        def job_outcome(self, event: Any) -> None:
            given.append(event)

    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(2), name="n")
        with working(url, queue, lambda _: None, metrics=Sink()):
            eventually(lambda: nothing_left(client, queue))

    batch, *runs = given
    assert batch == ReaderBatch(2, 0)
    assert runs == [JobOutcome("ok", 1, run.handler_duration_us, "n") for run in runs]
    assert len(runs) == 2


class Broken:
    """Raises whatever it is told."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getattr__(self, hook: str) -> Any:
        def raises(_: Any) -> None:
            self.asked.add(hook)
            raise RuntimeError("broken sink")

        return raises


@pytest.mark.parametrize("kind", ["good", "failing"])
def test_a_sink_that_raises_never_disturbs_a_job(url: str, client: redis.Redis, queue: str, kind: str) -> None:
    sink = Broken()
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(10))
        producer.add_in(1, 1)
        with working(url, queue, fail if kind == "failing" else lambda _: None, metrics=sink, max_attempts=2):
            eventually(lambda: nothing_left(client, queue))

    assert len(dead_letters(client, queue)) == (11 if kind == "failing" else 0)
    assert {"promoter_tick", "promoter_lock_outcome", "reader_batch", "job_outcome"} <= sink.asked
