"""The consumer at its everyday work: what handlers get, how many run, what is stored, and when it stands still."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from chasqui import (
    AuthFailed,
    Backoff,
    ConfigError,
    Consumer,
    OptionError,
    Producer,
    RetryOverride,
    Router,
    ServerError,
)
from chasqui.embedded import EmbeddedServer
from tests.engine.seen import an_envelope, in_delayed, key, keys_of
from tests.engine.worker_tools import (
    QUICK,
    Gate,
    consumers,
    eventually,
    nothing_left,
    pending,
    quiet_joined,
    working,
)

StartLike = Callable[..., EmbeddedServer]
RULES = RetryOverride(7, Backoff.fixed(250))


# What a handler gets


def test_a_handler_gets_every_field_of_the_job(url: str, queue: str) -> None:
    seen: list[Any] = []
    with Producer(url, queue=queue) as producer:
        producer.add({"to": "a"}, id="j", name="mail", retry=RULES)

        with working(url, queue, seen.append):
            eventually(lambda: seen)

    job = seen[0]
    assert (job.id, job.name, job.payload, job.attempt, job.run, job.retry) == ("j", "mail", {"to": "a"}, 0, 1, RULES)
    assert abs(job.created_at - datetime.now(UTC)).total_seconds() < 60
    assert job.entry_id.partition("-")[0].isdecimal()


def test_jobs_that_waited_before_the_group_was_made_are_run(url: str, client: redis.Redis, queue: str) -> None:
    client.xadd(key(queue, "stream"), {"d": an_envelope("old", 1)})
    seen: list[Any] = []

    with working(url, queue, seen.append):
        eventually(lambda: nothing_left(client, queue))

    assert [(job.id, job.name) for job in seen] == [("old", "")]


def test_finished_jobs_leave_no_key_but_stream_and_events(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(50))

        with working(url, queue, lambda job: job.payload):
            eventually(lambda: nothing_left(client, queue))

    assert keys_of(client, queue) == [key(queue, "events"), key(queue, "stream")]


def test_jobs_are_started_in_the_order_in_which_they_were_added(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[int] = []
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(200))

        with working(url, queue, lambda job: seen.append(job.payload), concurrency=1):
            eventually(lambda: nothing_left(client, queue))

    assert seen == list(range(200))


def test_two_consumers_share_the_jobs_and_each_is_run_once(url: str, client: redis.Redis, queue: str) -> None:
    first, second = Gate(), Gate()
    with (
        working(url, queue, first, concurrency=1, batch=1),
        working(url, queue, second, concurrency=1, batch=1),
        Producer(url, queue=queue) as producer,
    ):
        ids = producer.add_bulk(range(20))
        eventually(lambda: first.started and second.started)
        first.open()
        second.open()
        eventually(lambda: nothing_left(client, queue))

    assert sorted(first.finished + second.finished) == sorted(ids)


def test_a_raw_consumer_hands_out_and_stores_messagepack_as_it_is(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[Any] = []

    def handler(job: Any) -> bytes:
        seen.append(job.payload)
        return b"\x81\xa1r\x01"

    with Producer(url, queue=queue) as producer:
        producer.add({"a": 1}, id="j")
        with working(url, queue, handler, raw=True, store_results=True):
            eventually(lambda: nothing_left(client, queue))

        assert producer.get_result("j") == {"r": 1}
    assert seen == [b"\x81\xa1a\x01"]


def test_a_raw_result_without_a_byte_is_no_result(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer, working(url, queue, lambda job: b"", raw=True, store_results=True):
        producer.add(1, id="j")
        eventually(lambda: nothing_left(client, queue))

        assert producer.get_result("j") is None


# Threads and slots


@pytest.mark.parametrize("kind", ["coroutines", "threads"])
def test_as_many_handlers_run_as_concurrency_says_and_no_more(
    url: str, client: redis.Redis, queue: str, kind: str
) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(12))

        with working(url, queue, gate if kind == "coroutines" else gate.in_thread(), concurrency=5):
            eventually(lambda: len(gate.started) == 5)
            eventually(lambda: len(pending(client, queue)) == 12)
            assert len(gate.started) == 5
            gate.open()
            eventually(lambda: nothing_left(client, queue))

    assert len(gate.finished) == 12


def test_plain_functions_run_in_threads_and_do_not_hold_up_coroutines(url: str, queue: str) -> None:
    held, seen = Gate(), []
    router = Router().on("slow", held.in_thread()).on("quick", Gate(is_open=True))
    where: list[str] = []
    router.on("where", lambda _: where.append(threading.current_thread().name))
    with Producer(url, queue=queue) as producer, working(url, queue, router) as worker:
        producer.add(1, name="slow")
        eventually(lambda: held.started)
        seen = [producer.add(n, name="quick") for n in range(3)]
        producer.add(1, name="where")
        eventually(lambda: len(router.handlers["quick"].finished) == 3)  # type: ignore[attr-defined]
        eventually(lambda: where)

        assert worker.role.healthy
        assert held.finished == []
        held.open()
    assert sorted(router.handlers["quick"].finished) == sorted(seen)  # type: ignore[attr-defined]
    assert where[0].startswith("chasqui")


def test_a_worker_that_is_full_takes_no_more_until_there_is_room(url: str, client: redis.Redis, queue: str) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(200))

        with working(url, queue, gate, concurrency=2, batch=4):
            eventually(lambda: len(gate.started) == 2)
            time.sleep(0.2)  # time enough to take them all
            assert len(pending(client, queue)) <= 50
            gate.open()
            eventually(lambda: nothing_left(client, queue))

    assert len(set(gate.finished)) == len(gate.finished) == 200


def test_a_worker_that_is_full_of_long_jobs_is_healthy(url: str, client: redis.Redis, queue: str) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(4))

        with working(url, queue, gate, concurrency=1, batch=1) as worker:
            eventually(lambda: len(pending(client, queue)) >= 3)
            time.sleep(0.5)  # longer than three block intervals
            healthy = worker.role.healthy
            gate.open()

    assert healthy is True


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_extend_tells_whether_the_job_is_still_ours(url: str, client: redis.Redis, queue: str, kind: str) -> None:
    answers: list[bool] = []

    def rob(job: Any) -> None:
        client.xclaim(key(queue, "stream"), "default", "thief", 0, [job.entry_id], justid=True)

    async def in_coroutine(job: Any) -> None:
        answers.append(await job.extend())
        rob(job)
        answers.append(await job.extend())

    def in_thread(job: Any) -> None:
        answers.append(job.extend())
        rob(job)
        answers.append(job.extend())

    with Producer(url, queue=queue) as producer:
        producer.add(1)
        with working(url, queue, in_coroutine if kind == "coroutine" else in_thread):
            eventually(lambda: len(answers) == 2)

    assert answers == [True, False]


def test_extend_renews_the_claim_at_once(url: str, client: redis.Redis, queue: str) -> None:
    idle: list[int] = []

    async def handler(job: Any) -> None:
        client.xclaim(key(queue, "stream"), "default", worker.role.consumer_id, 0, [job.entry_id], idle=4_000)
        await job.extend()
        idle.append(client.xpending_range(key(queue, "stream"), "default", "-", "+", 1)[0]["time_since_delivered"])

    with Producer(url, queue=queue) as producer, quiet_joined(url, queue, handler) as worker:
        producer.add(1)
        eventually(lambda: idle)

    assert idle[0] < 1_000


# Pausing


def test_a_paused_queue_is_left_alone_and_resuming_continues(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[int] = []
    with Producer(url, queue=queue) as producer:
        producer.pause()

        with quiet_joined(url, queue, lambda job: seen.append(job.payload)) as worker:
            producer.add_bulk(range(5))
            time.sleep(0.4)  # nothing may happen, so there is nothing to wait for
            assert (seen, pending(client, queue), worker.role.healthy) == ([], [], True)

            producer.resume()
            eventually(lambda: nothing_left(client, queue))

    assert seen == list(range(5))


def test_a_queue_that_is_paused_while_it_is_worked_on_stops_at_the_next_read(
    url: str, client: redis.Redis, queue: str
) -> None:
    seen: list[int] = []
    with (
        Producer(url, queue=queue) as producer,
        quiet_joined(url, queue, lambda job: seen.append(job.payload), block_ms=20),
    ):
        producer.pause()
        time.sleep(0.3)  # longer than a read and a look at the key: both are far shorter
        producer.add("late")
        producer.add_in(1, "delayed")
        eventually(lambda: client.xlen(key(queue, "stream")) == 2)  # the promoter goes on

        time.sleep(0.2)
        assert seen == []
        producer.resume()
        eventually(lambda: nothing_left(client, queue))

    assert sorted(seen) == ["delayed", "late"]


# Beginning, and what is refused


def test_a_consumer_is_healthy_while_it_reads_and_neither_before_nor_after(url: str, queue: str) -> None:
    consumer = Consumer(url, queue=queue, **QUICK)
    assert consumer.healthy is False

    with working(url, queue, print) as worker:
        eventually(lambda: worker.role.healthy)

    assert worker.role.healthy is False


def test_a_consumer_gives_itself_a_name_and_takes_it_out_of_the_group_when_it_ends(
    url: str, client: redis.Redis, queue: str
) -> None:
    with Producer(url, queue=queue) as producer, quiet_joined(url, queue, print) as worker:
        producer.add(1)
        eventually(lambda: nothing_left(client, queue))
        assert worker.role.consumer_id.startswith("c-")
        assert consumers(client, queue) == [worker.role.consumer_id]

    assert consumers(client, queue) == []


def test_a_chosen_name_and_group_are_used(url: str, client: redis.Redis, queue: str) -> None:
    gate = Gate()
    with Producer(url, queue=queue) as producer, working(url, queue, gate, group="g", consumer_id="me"):
        producer.add(1)
        eventually(lambda: gate.started)
        assert consumers(client, queue, "g") == ["me"]
        gate.open()


def test_a_second_worker_of_a_chosen_name_is_warned_of(
    url: str, client: redis.Redis, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"consumer_id": "me", "block_ms": 5_000}
    with Producer(url, queue=queue) as producer, quiet_joined(url, queue, print, **options):
        producer.add(1)
        eventually(lambda: nothing_left(client, queue))
        assert "consumer_id" not in caplog.text
        with working(url, queue, print, **options):
            eventually(lambda: "a worker with consumer_id=me was at work" in caplog.text)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group": ""}, "group"),
        ({"concurrency": 0}, "concurrency"),
        ({"unknown_name": "x"}, "unknown_name"),
        ({"consumer_id": "spark-1"}, "consumer_id expects a name that does not start with spark-"),
    ],
    ids=repr,
)
def test_a_wrong_option_is_refused_before_anything_is_sent(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Consumer("redis://127.0.0.1:1/0", **options)


@pytest.mark.parametrize("name", ["ack_batch", "dlq_inflight", "retry_inflight", "delayed_promote_batch"])
def test_no_option_makes_a_script_handle_more_than_a_thousand_entries(name: str) -> None:
    Consumer("redis://127.0.0.1:1/0", **{name: 1000})

    with pytest.raises(OptionError, match=name):
        Consumer("redis://127.0.0.1:1/0", **{name: 1001})


def test_an_unknown_option_is_refused_with_the_nearest_known(url: str) -> None:
    with pytest.raises(OptionError, match="did you mean concurrency"):
        Consumer(url, concurency=3)


@pytest.mark.parametrize("handler", [None, 3, "handler"], ids=repr)
def test_what_cannot_be_called_is_refused_as_handler(url: str, handler: Any) -> None:
    with pytest.raises(ConfigError, match="handler expects a function"):
        asyncio.run(Consumer(url).run(handler))


def test_a_stream_key_of_another_type_ends_the_run_with_an_error(url: str, client: redis.Redis, queue: str) -> None:
    client.set(key(queue, "stream"), "mine", ex=60)

    worker = working(url, queue, print)

    with pytest.raises(ServerError, match="WRONGTYPE"):
        worker.join()


def test_a_wrong_password_ends_the_run_with_an_error(start_like: StartLike, queue: str) -> None:
    server = start_like(config={"requirepass": "right"})

    worker = working(server.url.replace("right", "wrong"), queue, print)

    with pytest.raises(AuthFailed, match="refuses the user or password"):
        worker.join()


def test_a_job_of_many_kinds_of_name_comes_back_with_it_after_a_failure(
    url: str, client: redis.Redis, queue: str
) -> None:
    names = ["", "x", "日本語", "a b", "n" * 256]
    with Producer(url, queue=queue) as producer:
        producer.add_bulk_named([(name, 1) for name in names])

        with working(url, queue, lambda _: 1 / 0, delayed_enabled=False):
            eventually(lambda: len(in_delayed(client, queue)) == len(names))

    assert sorted(job.name for job in in_delayed(client, queue)) == sorted(names)
