"""Lost replies and refused writes: each job is settled once, whatever becomes of the connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui import Producer, UnrecoverableError
from chasqui.embedded import EmbeddedServer
from tests.engine.breaks import each_break
from tests.engine.seen import in_delayed, key
from tests.engine.worker_proxy import script_proxy
from tests.engine.worker_tools import Gate, dead_letters, nothing_left, pending, quiet_joined, working
from tests.proxy import CUT, DROP_REPLY, GARBAGE, Act, Proxy
from tests.support import eventually

StartLike = Callable[..., EmbeddedServer]


def fail(_: Any) -> None:
    raise ValueError("boom")


def give_up(_: Any) -> None:
    raise UnrecoverableError("no")


# Settling


@each_break
def test_a_job_whose_ack_is_broken_off_is_done_once(
    server: EmbeddedServer, client: redis.Redis, queue: str, act: Act
) -> None:
    ran: list[str] = []
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        proxy.on("ack_delete", act=act)
        ids = producer.add_bulk(range(3))
        with working(proxy.url, queue, lambda job: ran.append(job.id)):
            eventually(lambda: proxy.counts["ACK_DELETE"] >= 2 and nothing_left(client, queue))

    assert sorted(ran) == sorted(ids)


@each_break
def test_a_result_whose_write_is_broken_off_is_stored(
    server: EmbeddedServer, client: redis.Redis, queue: str, act: Act
) -> None:
    ran: list[str] = []

    def handler(job: Any) -> int:
        ran.append(job.id)
        return len(ran)

    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        proxy.on("ack_with_results", act=act)
        producer.add(1, id="j")
        with working(proxy.url, queue, handler, store_results=True):
            assert producer.wait_for_result("j", 10) == 1
            eventually(lambda: nothing_left(client, queue))

    assert ran == ["j"]


@each_break
def test_a_retry_that_is_broken_off_is_written_once(
    server: EmbeddedServer, client: redis.Redis, queue: str, act: Act
) -> None:
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        proxy.on("retry_later", act=act)
        producer.add_bulk(range(3))
        options = {"delayed_enabled": False, "retry_initial_backoff_ms": 3_600_000, "retry_max_backoff_ms": 3_600_000}
        with working(proxy.url, queue, fail, **options):
            eventually(lambda: proxy.counts["RETRY_LATER"] >= 2 and pending(client, queue) == [])

    assert [job.attempt for job in in_delayed(client, queue)] == [1, 1, 1]
    assert client.xlen(key(queue, "stream")) == 0


@each_break
def test_a_dead_letter_that_is_broken_off_is_written_once(
    server: EmbeddedServer, client: redis.Redis, queue: str, act: Act
) -> None:
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        proxy.on("dead_letter", act=act)
        producer.add_bulk(range(3))
        with working(proxy.url, queue, give_up):
            eventually(lambda: proxy.counts["DEAD_LETTER"] >= 2 and nothing_left(client, queue))

    assert len(dead_letters(client, queue)) == 3


def test_settling_goes_on_after_the_server_forgot_its_scripts(url: str, client: redis.Redis, queue: str) -> None:
    with (
        Producer(url, queue=queue) as producer,
        quiet_joined(url, queue, lambda job: fail(job) if job.attempt == 0 else None),
    ):
        producer.add_bulk(range(3))
        eventually(lambda: nothing_left(client, queue))
        client.script_flush()

        producer.add_bulk(range(3))
        eventually(lambda: nothing_left(client, queue))

    assert dead_letters(client, queue) == []


@pytest.mark.parametrize("handler", [fail, give_up], ids=["delayed", "dlq"])
def test_outcomes_that_the_server_refuses_do_not_hold_up_the_others(
    url: str, client: redis.Redis, queue: str, handler: Any
) -> None:
    refusing = key(queue, "delayed" if handler is fail else "dlq")
    client.set(refusing, "mine", ex=60)
    done: list[str] = []
    options = {"delayed_enabled": False, "shutdown_deadline_secs": 1}
    with (
        Producer(url, queue=queue) as producer,
        working(url, queue, lambda job: handler(job) if job.name else done.append(job.id), **options),
    ):
        producer.add(1, name="bad")
        eventually(lambda: len(pending(client, queue)) == 1)
        ids = [producer.add(n) for n in range(3)]
        eventually(lambda: sorted(done) == sorted(ids))

        eventually(lambda: len(pending(client, queue)) == 1, within=4)  # the good ones are acknowledged
        client.delete(refusing)
        eventually(lambda: pending(client, queue) == [])  # and the bad one is, once it can be


def test_a_retry_and_a_dead_letter_are_written_also_when_the_server_is_out_of_memory(
    start_like: StartLike, queue: str
) -> None:
    gate = Gate()

    async def handler(job: Any) -> None:
        await gate(job)
        give_up(job) if job.name else fail(job)

    server = start_like()
    with redis.Redis.from_url(server.url, protocol=2) as client, Producer(server.url, queue=queue) as producer:
        with working(server.url, queue, handler, delayed_enabled=False, events_enabled=False):
            producer.add(1, id="again")
            producer.add(1, id="never", name="never")
            eventually(lambda: len(gate.started) == 2)
            client.config_set("maxmemory", "1")
            gate.open()
            eventually(lambda: pending(client, queue) == [])
            client.config_set("maxmemory", "0")

        assert ([job.id for job in in_delayed(client, queue)], len(dead_letters(client, queue))) == (["again"], 1)


# Reading


@pytest.mark.parametrize("act", [CUT, DROP_REPLY, GARBAGE], ids=["cut", "reply lost", "garbage"])
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_job_whose_read_is_broken_off_still_runs_once(
    server: EmbeddedServer, client: redis.Redis, queue: str, act: Act, max_attempts: int
) -> None:
    ran: list[tuple[str, int]] = []
    assert server.port
    with Proxy(server.port) as proxy, Producer(server.url, queue=queue) as producer:
        ids = producer.add_bulk(range(3))
        proxy.on("XREADGROUP", act=act)
        with working(proxy.url, queue, lambda job: ran.append((job.id, job.run)), max_attempts=max_attempts):
            eventually(lambda: nothing_left(client, queue), within=4)

    assert sorted(ran) == sorted((made, 1) for made in ids)
    assert dead_letters(client, queue) == []


def test_jobs_whose_read_is_broken_off_are_found_behind_a_thousand_that_are_held(
    server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    gate = Gate()
    assert server.port
    with Proxy(server.port) as proxy, Producer(server.url, queue=queue) as producer:
        options = {"batch": 2000, "concurrency": 2000, "claim_min_idle_ms": 60_000, "events_enabled": False}
        with working(proxy.url, queue, gate, **options):
            producer.add_bulk(range(1100))
            eventually(lambda: len(gate.started) == 1100)
            proxy.on("XREADGROUP", act=Act(before=lambda: producer.add("unseen"), reply=0))

            eventually(lambda: len(gate.started) == 1101)
            gate.open()


@each_break
def test_a_job_whose_takeover_is_broken_off_runs_once_and_is_charged_once(
    server: EmbeddedServer, client: redis.Redis, queue: str, act: Act
) -> None:
    ran: list[str] = []
    stream = key(queue, "stream")
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        producer.add(1, id="j")
        client.xgroup_create(stream, "default", 0)
        client.xreadgroup("default", "dead", {stream: ">"})
        client.xclaim(stream, "default", "dead", 0, [pending(client, queue)[0][0]], idle=60_000, justid=True)
        proxy.on("claim_stale", act=act)
        with working(proxy.url, queue, lambda job: ran.append(job.id), max_attempts=2):
            eventually(lambda: nothing_left(client, queue), within=4)

    assert ran == ["j"]
    assert dead_letters(client, queue) == []


def test_connections_that_break_one_after_another_forgive_no_start_of_a_dead_worker(
    server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    counted: list[int] = []
    stream = key(queue, "stream")
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        producer.add(1, id="j")
        client.xgroup_create(stream, "default", 0)
        client.xreadgroup("default", "dead", {stream: ">"})
        entry_id = pending(client, queue)[0][0]
        client.xclaim(stream, "default", "dead", 0, [entry_id], idle=60_000, retrycount=3, justid=True)
        proxy.on("claim_stale", nth=1, act=DROP_REPLY)
        for nth in (2, 3):
            proxy.on("claim_stale", nth=nth, act=CUT)
        with working(proxy.url, queue, lambda job: counted.append(job.deliveries), max_attempts=25):
            eventually(lambda: nothing_left(client, queue), within=5)

    assert counted == [3]


def test_jobs_that_run_are_not_given_back_when_a_read_is_broken_off(
    server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    gate = Gate()
    assert server.port
    with (
        Proxy(server.port) as proxy,
        Producer(server.url, queue=queue) as producer,
        working(proxy.url, queue, gate),
    ):
        producer.add(1, id="held")
        eventually(lambda: gate.started == ["held"])
        proxy.on("XREADGROUP", act=DROP_REPLY)
        reads = proxy.counts["XREADGROUP"]
        producer.add(2, id="unseen")
        eventually(lambda: proxy.counts["XREADGROUP"] > reads and len(gate.started) == 2)
        gate.open()
        eventually(lambda: nothing_left(client, queue))

    assert sorted(gate.started) == ["held", "unseen"]


def test_a_job_that_was_given_back_once_is_kept_by_its_worker_when_the_connection_breaks_again(
    server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    gate = Gate()
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        producer.add(1, id="j")
        proxy.on("XREADGROUP", act=DROP_REPLY)
        with working(proxy.url, queue, gate, max_attempts=25) as worker:
            eventually(lambda: gate.started == ["j"])
            released = proxy.counts["RELEASE_CLAIMS"]
            proxy.on("XREADGROUP", act=DROP_REPLY)
            looked = proxy.counts["XPENDING"]
            eventually(lambda: proxy.counts["XPENDING"] > looked and proxy.counts["CLAIM_STALE"] > 3)
            kept = pending(client, queue)
            gate.open()
            eventually(lambda: nothing_left(client, queue))

    assert released >= 1
    assert [(owner, count) for _, owner, count in kept] == [(worker.role.consumer_id, 1)]
    assert gate.finished == ["j"]


@pytest.mark.parametrize("command", ["XGROUP", "EXISTS", "XPENDING"])
def test_a_worker_starts_and_works_although_this_is_cut_off(
    server: EmbeddedServer, client: redis.Redis, queue: str, command: str
) -> None:
    ran: list[str] = []
    assert server.port
    with Proxy(server.port) as proxy, Producer(server.url, queue=queue) as producer:
        proxy.on(command, act=CUT)
        proxy.on("XREADGROUP", act=DROP_REPLY)  # makes it look for what it may have been given
        producer.add(1, id="j")
        with working(proxy.url, queue, lambda job: ran.append(job.id)):
            eventually(lambda: nothing_left(client, queue) and ran)

    assert ran == ["j"]


def test_renewals_that_are_cut_off_lose_no_job(server: EmbeddedServer, client: redis.Redis, queue: str) -> None:
    gate = Gate()
    options = {"claim_min_idle_ms": 900, "max_attempts": 25}
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        for nth in (1, 3):
            proxy.on("renew_claims", nth=nth, act=CUT)
        with working(proxy.url, queue, gate, **options):
            producer.add(1, id="j")
            eventually(lambda: gate.started)
            with working(server.url, queue, gate, **options):
                eventually(lambda: proxy.counts["RENEW_CLAIMS"] >= 5)
                gate.open()
                eventually(lambda: nothing_left(client, queue))

    assert gate.finished == ["j"]


def test_a_connection_that_breaks_at_every_command_in_turn_loses_and_doubles_nothing(
    server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    done: list[str] = []

    def handler(job: Any) -> None:
        if job.payload % 3 == 0 and job.attempt == 0:
            fail(job)
        if job.payload % 3 == 1:
            give_up(job)
        done.append(job.id)

    names = ("XREADGROUP", "claim_stale", "ack_delete", "retry_later", "dead_letter", "promote_due", "XADD")
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        for name in names:
            for nth in range(1, 20, 2):
                proxy.on(name, nth=nth, act=CUT if nth % 4 == 1 else DROP_REPLY, may_be_missed=True)
        with working(proxy.url, queue, handler, batch=10):
            ids = [producer.add(n) for n in range(120)]
            eventually(lambda: len(done) + len(dead_letters(client, queue)) >= 120, within=30)
            eventually(lambda: nothing_left(client, queue))

    assert sorted(done) == sorted(made for n, made in enumerate(ids) if n % 3 != 1)
    assert len(dead_letters(client, queue)) == 40
