"""Bulks whose connection breaks: sent again where that cannot double a job, else the error tells which are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui import BulkInterrupted, ConnectionLost, NewJob
from chasqui.embedded import start
from tests.engine.breaks import KEEPS_DATA, each_break, gone, proxy_of
from tests.engine.conftest import Connect
from tests.engine.seen import ids, in_delayed, in_stream, payloads
from tests.proxy import CUT, DROP_REPLY, GARBAGE, Act, Proxy, call

JOBS = 600  # three calls with ids


def add_with_ids(producer: Any) -> list[str]:
    return list(producer.add_bulk_jobs([NewJob(n, id=f"i-{n}") for n in range(JOBS)]))


def add_plain(producer: Any) -> list[str]:
    return list(producer.add_bulk(range(JOBS)))


def add_delayed(producer: Any) -> list[str]:
    return list(producer.add_in_bulk(60_000, range(JOBS)))


each_bulk = pytest.mark.parametrize(
    ("bulk", "command"),
    [
        pytest.param(add_with_ids, "EVALSHA", id="with ids"),
        pytest.param(add_delayed, "ZADD", id="delayed"),
        pytest.param(add_plain, "XADD", id="plain"),
    ],
)
each_resumed_bulk = pytest.mark.parametrize(
    ("bulk", "command"),
    [pytest.param(add_with_ids, "EVALSHA", id="with ids"), pytest.param(add_delayed, "ZADD", id="delayed")],
)


# Bulks with ids, and delayed ones: sent again


@each_resumed_bulk
@each_break
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_bulk_that_can_be_sent_again_goes_on_without_doubles(
    connect: Connect,
    proxy: Proxy,
    client: redis.Redis,
    queue: str,
    bulk: Callable[[Any], list[str]],
    command: str,
    act: Act,
    nth: int,
) -> None:
    producer = connect(proxy.url, queue=queue)
    proxy.on(command, nth=nth, act=act)

    made = bulk(producer)

    jobs = in_stream(client, queue) + in_delayed(client, queue)
    assert sorted(ids(jobs)) == sorted(made)
    assert sorted(payloads(jobs)) == list(range(JOBS))
    assert proxy.counts[command] > nth


@each_resumed_bulk
def test_a_bulk_goes_on_as_long_as_each_connection_brings_it_further(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str, bulk: Callable[[Any], list[str]], command: str
) -> None:
    producer = connect(proxy.url, queue=queue, reconnect_attempts=1)
    for nth in range(2, 14, 2):
        proxy.on(command, nth=nth, act=DROP_REPLY if nth % 4 else CUT)

    bulk(producer)

    assert sorted(payloads(in_stream(client, queue) + in_delayed(client, queue))) == list(range(JOBS))


def test_a_bulk_with_ids_goes_on_after_a_script_flush(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str
) -> None:
    producer = connect(proxy.url, queue=queue)
    for nth in (2, 3):
        proxy.on("EVALSHA", nth=nth, act=call(client.script_flush))

    made = add_with_ids(producer)

    assert ids(in_stream(client, queue)) == made


@each_resumed_bulk
def test_a_bulk_goes_on_after_the_server_was_restarted_with_its_data(
    connect: Connect, bulk: Callable[[Any], list[str]], command: str
) -> None:
    with start(config=KEEPS_DATA) as server, proxy_of(server) as proxy, redis.Redis.from_url(server.url) as client:
        producer = connect(proxy.url, queue="q")
        proxy.on(command, nth=3, act=call(server.restart))

        bulk(producer)

        assert sorted(payloads(in_stream(client, "q") + in_delayed(client, "q"))) == list(range(JOBS))


# Bulks without ids: the error tells


@pytest.mark.parametrize("nth", [1, 300, JOBS])
@pytest.mark.parametrize(("act", "more"), [(CUT, 0), (DROP_REPLY, 1)], ids=["cut", "reply lost"])
def test_a_bulk_without_ids_is_not_sent_again_and_the_error_tells_what_is_known(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str, act: Act, more: int, nth: int
) -> None:
    producer = connect(proxy.url, queue=queue)
    proxy.on("XADD", nth=nth, act=act)

    with pytest.raises(BulkInterrupted, match=f"bulk of {JOBS} jobs stopped: {nth - 1} are added") as caught:
        producer.add_bulk(range(JOBS))

    error, there = caught.value, ids(in_stream(client, queue))
    assert there == error.ids[: nth - 1 + more]
    assert error.added == error.ids[: nth - 1]
    assert error.acknowledged == nth - 1
    assert error.acknowledged + 1 <= error.acknowledged + error.unknown <= JOBS
    assert isinstance(error.__cause__, ConnectionLost)
    assert error.code == "CMQ-302"


def test_after_an_interrupted_bulk_the_next_call_works(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str
) -> None:
    producer = connect(proxy.url, queue=queue, pool_size=1)
    proxy.on("XADD", nth=200, act=CUT)
    with pytest.raises(BulkInterrupted):
        producer.add_bulk(range(JOBS))

    producer.add("next")
    producer.add_bulk(["bulk"])

    assert payloads(in_stream(client, queue))[199:] == ["next", "bulk"]


def test_a_bulk_that_finds_its_connection_closed_has_not_begun(
    connect: Connect, proxy: Proxy, client: redis.Redis, queue: str
) -> None:
    producer = connect(proxy.url, queue=queue)
    proxy.on("XLEN", act=CUT)

    producer.add_bulk(range(JOBS))

    assert payloads(in_stream(client, queue)) == list(range(JOBS))


@pytest.mark.parametrize(
    ("nth", "carried_out"), [(1, True), (3, True), (3, False)], ids=["first carried out", "carried out", "cut"]
)
@each_bulk
def test_when_the_server_is_gone_for_good_the_error_tells_which_jobs_are_in(
    connect: Connect, bulk: Callable[[Any], list[str]], command: str, carried_out: bool, nth: int
) -> None:
    with start(config=KEEPS_DATA) as server, proxy_of(server) as proxy, redis.Redis.from_url(server.url) as client:
        producer = connect(proxy.url, queue="q", reconnect_attempts=2)
        producer.add_bulk_jobs([NewJob("warm", id="warm")])
        proxy.on(command, nth=nth, act=gone(server, proxy, carried_out=carried_out))

        with pytest.raises((BulkInterrupted, ConnectionLost)) as caught:
            bulk(producer)

        server.restart()
        error, there = caught.value, ids(in_stream(client, "q") + in_delayed(client, "q"))[1:]
        if isinstance(error, ConnectionLost):
            assert error.sent or not there, f"{len(there)} jobs are in, and the error says that nothing was sent"
            return
        assert set(error.added) <= set(there) <= set(error.ids)
        assert error.acknowledged <= len(there) <= error.acknowledged + error.unknown
        assert error.acknowledged + error.unknown <= len(error.ids) == JOBS
        assert isinstance(error.__cause__, ConnectionLost)


@each_bulk
def test_bytes_that_are_no_reply_are_a_lost_connection(
    connect: Connect,
    proxy: Proxy,
    client: redis.Redis,
    queue: str,
    bulk: Callable[[Any], list[str]],
    command: str,
) -> None:
    producer = connect(proxy.url, queue=queue)
    proxy.on(command, act=GARBAGE)

    if command == "XADD":
        with pytest.raises(BulkInterrupted) as caught:
            bulk(producer)
        assert isinstance(caught.value.__cause__, ConnectionLost)
    else:
        bulk(producer)
        assert len(in_stream(client, queue) + in_delayed(client, queue)) == JOBS
