"""The server gone: workers say that they are not healthy, wait, and go on by themselves, with nothing lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from chasqui import ConnectionLost, Producer
from chasqui.embedded import EmbeddedServer
from tests.engine.breaks import KEEPS_DATA, is_busy, run_for_ever
from tests.engine.conftest import Connect
from tests.engine.seen import in_stream, payloads
from tests.engine.worker_tools import Gate, Running, dead_letters, nothing_left, pending, working
from tests.proxy import Proxy
from tests.support import eventually

StartLike = Callable[..., EmbeddedServer]
# As in production, except for the wait of reads: the tests of others may shorten the waits between tries, these not.
AS_SHIPPED: dict[str, Any] = {"reconnect_initial_ms": 100, "reconnect_max_ms": 1_000, "run_scheduler": True}


def unhealthy_while(worker: Running, seconds: float) -> None:
    """It turns unhealthy, and stays so until the end."""
    until = time.monotonic() + seconds
    eventually(lambda: not worker.role.healthy)
    while time.monotonic() < until:
        assert not worker.role.healthy
        time.sleep(0.02)


def restarted(server: EmbeddedServer) -> float:
    server.restart()
    return time.monotonic()


@pytest.mark.parametrize(
    "away_s", [pytest.param(2.0, id="for two seconds"), pytest.param(20.0, id="for long", marks=pytest.mark.slow)]
)
def test_work_resumes_within_two_seconds_of_the_servers_return_and_nothing_is_lost(
    start_like: StartLike, queue: str, away_s: float
) -> None:
    server = start_like(config=KEEPS_DATA)
    seen: list[int] = []
    with (
        redis.Redis.from_url(server.url, protocol=2) as client,
        Producer(server.url, queue=queue) as producer,
        working(server.url, queue, lambda job: seen.append(job.payload), **AS_SHIPPED) as worker,
    ):
        producer.add_bulk(range(10))
        eventually(lambda: len(seen) == 10 and worker.role.healthy)
        producer.add_in(int(away_s * 900), "delayed")
        server.kill()
        unhealthy_while(worker, away_s)
        back = restarted(server)
        producer.add_bulk(range(10, 20))
        eventually(lambda: len(seen) >= 21, within=5)
        took = time.monotonic() - back
        eventually(lambda: nothing_left(client, queue))
        eventually(lambda: worker.role.healthy)

    assert took < 2.0
    assert sorted(seen, key=str) == sorted([*range(20), "delayed"], key=str)
    assert dead_letters(client, queue) == []


def test_jobs_that_run_while_the_server_is_restarted_are_done_once(start_like: StartLike, queue: str) -> None:
    server = start_like(config=KEEPS_DATA)
    gate = Gate()
    with (
        redis.Redis.from_url(server.url, protocol=2) as client,
        Producer(server.url, queue=queue) as producer,
        working(server.url, queue, gate, concurrency=2, max_attempts=1, **AS_SHIPPED) as worker,
    ):
        ids = producer.add_bulk(range(5))
        eventually(lambda: len(pending(client, queue)) == 5 and len(gate.started) == 2)
        server.kill()
        gate.open()  # the two that run end while the server is away; what came of them must not be lost
        eventually(lambda: len(gate.finished) >= 2)
        unhealthy_while(worker, 0.5)
        restarted(server)
        eventually(lambda: nothing_left(client, queue), within=5)

    assert sorted(gate.finished) == sorted(ids)
    assert dead_letters(client, queue) == []


@pytest.mark.parametrize("outcome", ["retry", "dead letter"])
def test_an_outcome_of_the_outage_is_written_when_the_server_is_back(
    start_like: StartLike, queue: str, outcome: str
) -> None:
    server = start_like(config=KEEPS_DATA)
    gate = Gate()

    async def handler(job: Any) -> None:
        await gate(job)
        if job.attempt == 0:
            raise ValueError("boom")

    with (
        redis.Redis.from_url(server.url, protocol=2) as client,
        Producer(server.url, queue=queue) as producer,
        working(server.url, queue, handler, max_attempts=1 if outcome == "dead letter" else 2),
    ):
        producer.add(1, id="j")
        eventually(lambda: gate.started)
        server.kill()
        gate.open()
        eventually(lambda: gate.finished)
        restarted(server)
        eventually(lambda: nothing_left(client, queue) and (dead_letters(client, queue) or len(gate.finished) == 2))

    assert len(dead_letters(client, queue)) == (1 if outcome == "dead letter" else 0)


def test_a_server_that_is_not_there_yet_is_waited_for(start_like: StartLike, queue: str) -> None:
    server = start_like(config=KEEPS_DATA)
    seen: list[int] = []
    server.kill()
    with working(server.url, queue, lambda job: seen.append(job.payload), **AS_SHIPPED) as worker:
        time.sleep(0.5)
        assert not worker.role.healthy
        back = restarted(server)
        with Producer(server.url, queue=queue) as producer:
            producer.add(1)
            eventually(lambda: seen == [1], within=5)

    assert time.monotonic() - back < 2.5


def test_a_server_that_is_not_ready_yet_is_waited_for(start_like: StartLike, queue: str) -> None:
    server = start_like(config={"lua-time-limit": "1"})
    seen: list[int] = []
    assert server.port
    with (
        Proxy(server.port) as proxy,
        redis.Redis.from_url(server.url) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        script = threads.submit(run_for_ever, server.url)
        eventually(lambda: is_busy(client))
        with working(proxy.url, queue, lambda job: seen.append(job.payload), reconnect_attempts=0) as worker:
            eventually(lambda: worker.ended or proxy.counts["XGROUP"] >= 2)
            client.script_kill()
            assert script.result(30) == "killed"
            with Producer(server.url, queue=queue) as producer:
                producer.add(1)
                eventually(lambda: seen == [1] or worker.ended)

    assert seen == [1]


def test_a_server_that_lost_its_data_is_worked_for_again(start_like: StartLike, queue: str) -> None:
    server = start_like()  # keeps nothing
    seen: list[int] = []
    with (
        Producer(server.url, queue=queue) as producer,
        working(server.url, queue, lambda job: seen.append(job.payload), **AS_SHIPPED),
    ):
        producer.add(1)
        eventually(lambda: seen == [1])
        server.kill()
        restarted(server)
        producer.add(2)

        eventually(lambda: seen == [1, 2], within=5)


def test_a_server_that_stands_still_for_a_while_is_waited_for(start_like: StartLike, queue: str) -> None:
    server = start_like()
    seen: list[int] = []
    with (
        redis.Redis.from_url(server.url, protocol=2) as client,
        Producer(server.url, queue=queue) as producer,
        working(server.url, queue, lambda job: seen.append(job.payload), **AS_SHIPPED) as worker,
    ):
        producer.add(1)
        eventually(lambda: seen == [1])
        os.kill(server.pid, signal.SIGSTOP)
        try:
            unhealthy_while(worker, 1.0)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        back = time.monotonic()
        producer.add(2)
        eventually(lambda: seen == [1, 2] and nothing_left(client, queue), within=5)
        took = time.monotonic() - back

    assert took < 2.0


def test_a_server_that_takes_connections_and_says_nothing_is_not_waited_for_for_ever(
    connect: Connect, start_like: StartLike, queue: str
) -> None:
    server = start_like()
    producer = connect(server.url, queue=queue, socket_timeout_ms=200, connect_timeout_ms=200, reconnect_attempts=1)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        asked = time.monotonic()
        with pytest.raises(ConnectionLost) as caught:
            producer.add(1)
        took = time.monotonic() - asked
    finally:
        os.kill(server.pid, signal.SIGCONT)

    assert not caught.value.sent
    assert took < 5.0


def test_connections_killed_by_the_server_again_and_again_lose_and_double_nothing(
    url: str, client: redis.Redis, queue: str
) -> None:
    seen: list[int] = []
    with (
        Producer(url, queue=queue) as producer,
        working(url, queue, lambda job: seen.append(job.payload), max_attempts=1),
    ):
        for start in range(0, 100, 10):
            producer.add_bulk(range(start, start + 10))
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        eventually(lambda: nothing_left(client, queue))

    assert sorted(seen) == list(range(100))
    assert dead_letters(client, queue) == []


# A failover behind a fixed address: old connections lead to what is a replica now, new ones to the new primary.


def test_a_producer_behind_a_fixed_address_follows_a_failover(
    connect: Connect, start_like: StartLike, queue: str
) -> None:
    old, new = start_like(), start_like()
    with Proxy(old.port) as proxy, redis.Redis.from_url(new.url) as client:
        producer = connect(proxy.url, queue=queue)
        producer.add("before")
        fail_over(proxy, old, new)

        producer.add("one")
        producer.add_bulk(["of", "many"])
        producer.add("two", id="i")

        assert payloads(in_stream(client, queue)) == ["one", "of", "many", "two"]


def test_a_worker_behind_a_fixed_address_follows_a_failover_and_settles_there(
    start_like: StartLike, queue: str
) -> None:
    old, new = start_like(), start_like()
    gate = Gate()
    with (
        Proxy(old.port) as proxy,
        redis.Redis.from_url(new.url, protocol=2) as client,
        working(proxy.url, queue, gate) as worker,
        Producer(old.url, queue=queue) as producer,
    ):
        producer.add(1, id="running")
        eventually(lambda: gate.started == ["running"])
        client.replicaof("127.0.0.1", old.port)
        eventually(lambda: len(pending(client, queue)) == 1)
        fail_over(proxy, old, new)
        gate.open()

        with Producer(new.url, queue=queue) as later:
            later.add(2, id="next")
            eventually(lambda: gate.finished == ["running", "next"] and nothing_left(client, queue))
        eventually(lambda: worker.role.healthy)


def fail_over(proxy: Proxy, old: EmbeddedServer, new: EmbeddedServer) -> None:
    with redis.Redis.from_url(old.url) as demoted, redis.Redis.from_url(new.url) as promoted:
        promoted.replicaof("NO", "ONE")
        demoted.replicaof("127.0.0.1", new.port)
        eventually(lambda: demoted.info("replication")["role"] == "slave")
    assert new.port
    proxy.lead_to(new.port)
