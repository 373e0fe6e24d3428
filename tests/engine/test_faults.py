"""Lost replies, cut connections, servers that die: what was promised still holds, and the error tells what it knows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui import AsyncProducer, ConnectionLost
from chasqui.embedded import EmbeddedServer, start
from tests.engine.breaks import KEEPS_DATA, each_break, gone, proxy_of
from tests.engine.conftest import Connect
from tests.engine.seen import in_delayed, in_stream, payloads, put_dead_letter
from tests.proxy import CUT, DROP_REPLY, Act, Proxy, call, delay

StartLike = Callable[..., EmbeddedServer]


# One job


@each_break
def test_an_add_with_an_id_survives_a_broken_connection_as_one_job(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str, act: Act
) -> None:
    producer = connect(proxy.url, queue=queue)
    producer.add("warm", id="warm")
    proxy.on("EVALSHA", act=act)

    assert producer.add(1, id="i") == "i"
    assert payloads(in_stream(client, queue)) == ["warm", 1]


@pytest.mark.parametrize(("act", "there"), [(DROP_REPLY, [1]), (CUT, [])], ids=["reply lost", "cut"])
def test_an_add_without_an_id_is_not_sent_twice_and_the_error_says_that_it_was_sent(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str, act: Act, there: list[int]
) -> None:
    producer = connect(proxy.url, queue=queue)
    producer.add("warm")
    proxy.on("EVALSHA", act=act)

    with pytest.raises(ConnectionLost, match=rf"127\.0\.0\.1:{proxy.port}.*may have been carried out") as caught:
        producer.add(1)

    assert caught.value.sent is True
    assert payloads(in_stream(client, queue)) == ["warm", *there]
    producer.add(2)
    assert payloads(in_stream(client, queue)) == ["warm", *there, 2]


@each_break
def test_a_delayed_add_survives_a_broken_connection_as_one_job(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str, act: Act
) -> None:
    producer = connect(proxy.url, queue=queue)
    proxy.on("ZADD", act=act)
    proxy.on("EVALSHA", nth=1, act=act)

    producer.add_in(60_000, 1)
    producer.add_in(60_000, 2, id="i")

    assert sorted(payloads(in_delayed(client, queue))) == [1, 2]


def test_a_cancel_whose_reply_is_lost_does_not_claim_to_know(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str
) -> None:
    producer = connect(proxy.url, queue=queue)
    producer.add_in(60_000, 1, id="i")
    producer.cancel_delayed("warm")
    proxy.on("EVALSHA", act=DROP_REPLY)

    with pytest.raises(ConnectionLost) as caught:
        producer.cancel_delayed("i")

    assert caught.value.sent is True
    assert in_delayed(client, queue) == []


@each_break
def test_reading_is_tried_again(connect: Connect, proxy: Proxy, client: redis.Redis, queue: str, act: Act) -> None:
    producer = connect(proxy.url, queue=queue)
    put_dead_letter(client, queue, 1)
    for command in ("XLEN", "XRANGE", "GET", "SET"):
        proxy.on(command, act=act)

    assert producer.stats().dlq == 1
    assert len(producer.peek_dlq()) == 1
    assert producer.get_result("i") is None
    producer.pause()
    assert producer.stats().paused


@each_break
def test_a_replay_survives_a_broken_connection_and_moves_each_letter_once(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str, act: Act
) -> None:
    for n in range(250):
        put_dead_letter(client, queue, n)
    producer = connect(proxy.url, queue=queue)
    proxy.on("EVALSHA", nth=2, act=act)

    moved = producer.replay_dlq(1000)

    assert payloads(in_stream(client, queue)) == list(range(250))
    assert moved in (150, 250)


def test_a_late_reply_is_not_taken_for_that_of_the_next_command(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str
) -> None:
    producer = connect(proxy.url, queue=queue, socket_timeout_ms=150, reconnect_attempts=0)
    producer.add(1)
    proxy.on("EVALSHA", act=delay(0.5))

    with pytest.raises(ConnectionLost, match="gave no answer") as caught:
        producer.add(2)

    assert caught.value.sent is True
    assert producer.get_result("i") is None
    assert producer.stats().waiting == 2


def test_an_add_that_is_cancelled_leaves_no_reply_for_the_next_one(
    proxy: Proxy, client: redis.Redis, queue: str
) -> None:
    async def scenario() -> None:
        async with AsyncProducer(proxy.url, queue=queue, pool_size=1) as producer:
            await producer.add(1)
            proxy.on("EVALSHA", act=delay(0.5))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(producer.add(2), 0.1)

            assert await producer.get_result("i") is None
            assert await producer.add(3, id="i") == "i"

    asyncio.run(scenario())

    assert payloads(in_stream(client, queue)) == [1, 2, 3]


# The server comes and goes


def test_a_server_restarted_between_calls_is_not_noticed(connect: Connect, start_like: StartLike) -> None:
    server = start_like(config=KEEPS_DATA)
    with redis.Redis.from_url(server.url) as client:
        producer = connect(server.url, queue="q")
        for add in (lambda: producer.add(0), lambda: producer.add_bulk([1]), lambda: producer.add(2, id="i")):
            add()
            server.restart()

        producer.add(3)

        assert payloads(in_stream(client, "q")) == [0, 1, 2, 3]


def test_connections_that_the_server_closed_while_idle_are_replaced(
    connect: Connect, server: EmbeddedServer, client: redis.Redis, queue: str
) -> None:
    producer = connect(server.url, queue=queue)
    for n in range(5):
        producer.add(n)
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    assert payloads(in_stream(client, queue)) == list(range(5))


def test_an_add_waits_for_a_server_that_comes_back(connect: Connect) -> None:
    with start(config=KEEPS_DATA) as server, proxy_of(server) as proxy, redis.Redis.from_url(server.url) as client:
        producer = connect(proxy.url, queue="q")
        producer.add(1)
        proxy.on("EVALSHA", act=call(server.restart))

        producer.add(2, id="i")

        assert payloads(in_stream(client, "q")) == [1, 2]


@pytest.mark.parametrize(
    "use",
    [
        lambda producer: producer.add(1),
        lambda producer: producer.add(1, id="i"),
        lambda producer: producer.add_bulk([1]),
        lambda producer: producer.add_in(5, 1),
        lambda producer: producer.add_in_bulk(5, [1], ids=["i"]),
        lambda producer: producer.cancel_delayed("i"),
        lambda producer: producer.peek_dlq(),
        lambda producer: producer.replay_dlq(),
        lambda producer: producer.purge_dlq(),
        lambda producer: producer.get_result("i"),
        lambda producer: producer.wait_for_result("i", 5),
        lambda producer: producer.stats(),
        lambda producer: producer.pause(),
        lambda producer: producer.resume(),
    ],
    ids=["add", "id", "bulk", "in", "in_bulk", "cancel", "peek", "replay", "purge", "get", "wait", "stats", "p", "r"],
)
def test_a_server_that_is_down_is_named_without_the_password(connect: Connect, use: Callable[[Any], Any]) -> None:
    producer = connect("redis://someone:hunter2@127.0.0.1:1/0", queue="q", reconnect_attempts=2)

    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1 cannot be reached") as caught:
        use(producer)

    assert caught.value.sent is False
    assert caught.value.code == "CMQ-001"
    assert "hunter2" not in f"{caught.value!r} {caught.value}"


def test_without_reconnect_attempts_a_call_fails_at_once(connect: Connect) -> None:
    producer = connect("redis://127.0.0.1:1/0", queue="q", reconnect_attempts=0, reconnect_initial_ms=5000)
    started = time.monotonic()

    with pytest.raises(ConnectionLost):
        producer.add(1)

    assert time.monotonic() - started < 2


def test_a_lost_reply_is_still_told_when_the_server_is_gone_afterwards(connect: Connect) -> None:
    with start(config=KEEPS_DATA) as server, proxy_of(server) as proxy, redis.Redis.from_url(server.url) as client:
        producer = connect(proxy.url, queue="q", reconnect_attempts=2)
        producer.add("warm", id="warm")
        proxy.on("EVALSHA", act=gone(server, proxy, carried_out=True))

        with pytest.raises(ConnectionLost) as caught:
            producer.add(1, id="i")

        server.restart()
        assert payloads(in_stream(client, "q")) == ["warm", 1]
        assert caught.value.sent is True
