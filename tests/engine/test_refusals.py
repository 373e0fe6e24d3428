"""Servers that refuse: each refusal has its error, and nothing is written, or the error of a bulk tells what was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from chasqui import (
    AuthFailed,
    BulkInterrupted,
    ChasquiError,
    NewJob,
    OutOfMemory,
    ReadOnlyServer,
    ServerError,
)
from chasqui.embedded import EmbeddedServer
from tests.conftest import skip_before_redis_7
from tests.engine.breaks import is_busy, run_for_ever
from tests.engine.conftest import Connect
from tests.engine.seen import ids, in_delayed, in_stream, key, keys_of, payloads, put_dead_letter
from tests.proxy import Act, Proxy, call
from tests.support import eventually

Use = Callable[[Any], Any]
StartLike = Callable[..., EmbeddedServer]

ADDS: dict[str, Use] = {
    "add": lambda producer: producer.add(1),
    "add with id": lambda producer: producer.add(1, id="i"),
    "add_bulk": lambda producer: producer.add_bulk(range(300)),
    "add_bulk_jobs": lambda producer: producer.add_bulk_jobs([NewJob(1, id="i"), NewJob(2, delay_ms=5000)]),
    "add_in": lambda producer: producer.add_in(60_000, 1),
    "add_in with id": lambda producer: producer.add_in(60_000, 1, id="i"),
    "add_in_bulk": lambda producer: producer.add_in_bulk(60_000, range(300)),
}
WRITES: dict[str, Use] = ADDS | {
    "replay_dlq": lambda producer: producer.replay_dlq(),
    "purge_dlq": lambda producer: producer.purge_dlq(),
    "pause": lambda producer: producer.pause(),
}
READS: dict[str, Use] = {
    "peek_dlq": lambda producer: producer.peek_dlq(),
    "get_result": lambda producer: producer.get_result("i"),
    "stats": lambda producer: producer.stats(),
}


def errors_of(uses: dict[str, Use], producer: Any) -> dict[str, type[Exception] | None]:
    """What each use raises."""
    found: dict[str, type[Exception] | None] = {}
    for name, use in uses.items():
        try:
            use(producer)
            found[name] = None
        except ChasquiError as error:
            found[name] = type(error)
    return found


def each(uses: dict[str, Use]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("use", [pytest.param(use, id=name) for name, use in uses.items()])


# Who may


@pytest.fixture
def user(server: EmbeddedServer, client: redis.Redis) -> Iterator[Callable[..., str]]:
    """Makes a user with those ACL rules, gone afterwards, and gives the url that logs in as it."""

    def make(*rules: str) -> str:
        client.execute_command("ACL", "SETUSER", "someone", "on", ">hunter2", *rules)
        return f"redis://someone:hunter2@127.0.0.1:{server.port}/0"

    yield make
    client.execute_command("ACL", "DELUSER", "someone")


def test_a_wrong_password_is_told_without_repeating_it(connect: Connect, server: EmbeddedServer) -> None:
    producer = connect(f"redis://someone:wrong-pass@127.0.0.1:{server.port}/0", queue="q")

    with pytest.raises(AuthFailed, match=rf"127\.0\.0\.1:{server.port} refuses the user or password") as caught:
        producer.add(1)

    assert "wrong-pass" not in f"{caught.value!r} {caught.value}"
    assert caught.value.code == "CMQ-001"
    assert set(errors_of(WRITES | READS, producer).values()) == {AuthFailed}


def test_a_missing_password_is_told(connect: Connect, start_like: StartLike) -> None:
    server = start_like(config={"requirepass": "hunter2"})
    producer = connect(f"redis://127.0.0.1:{server.port}/0", queue="q")

    found = errors_of(WRITES | READS, producer)

    assert found == dict.fromkeys(WRITES | READS, AuthFailed)


def test_a_bulk_is_not_sent_before_the_server_has_let_us_in(connect: Connect, start_like: StartLike) -> None:
    server = start_like(config={"requirepass": "hunter2"})
    assert server.port
    with Proxy(server.port) as proxy:
        producer = connect(proxy.url, queue="q")

        for name in ("add_bulk", "add_in_bulk"):
            with pytest.raises(AuthFailed):
                ADDS[name](producer)

        assert proxy.connections > 0
        assert proxy.counts["XADD"] == proxy.counts["ZADD"] == 0


def test_the_right_password_lets_in(connect: Connect, start_like: StartLike) -> None:
    server = start_like(config={"requirepass": "p@ss/w:rd%20"})
    producer = connect(server.url, queue="q")

    producer.add(1)

    assert producer.stats().waiting == 1


FORBIDDEN = {
    "no command": ["~*", "-@all"],
    "no scripts": ["~*", "+@all", "-evalsha", "-eval", "-@write"],
    "no such key": ["~elsewhere", "+@all"],
    "read-only key": ["%R~*", "+@all"],
}


@each(WRITES)
@pytest.mark.parametrize("rules", [pytest.param(rules, id=name) for name, rules in FORBIDDEN.items()])
def test_a_user_that_may_not_write_is_told_and_nothing_is_written(
    connect: Connect, user: Callable[..., str], client: redis.Redis, queue: str, rules: list[str], use: Use
) -> None:
    if "%R~*" in rules:
        skip_before_redis_7(client, "keys that may only be read")
    put_dead_letter(client, queue, 1)
    producer = connect(user(*rules), queue=queue)

    with pytest.raises(AuthFailed, match="ACL") as caught:
        use(producer)

    assert "hunter2" not in str(caught.value)
    assert keys_of(client, queue) == [key(queue, "dlq")]
    assert client.xlen(key(queue, "dlq")) == 1


@pytest.mark.parametrize("name", ["add", "add with id", "replay_dlq"])
def test_a_user_whose_script_may_not_write_is_told_and_nothing_is_written(
    connect: Connect, user: Callable[..., str], client: redis.Redis, queue: str, name: str
) -> None:
    put_dead_letter(client, queue, 1)
    producer = connect(user("~*", "+@all", "-xadd", "-zadd", "-xdel", "-set"), queue=queue)

    with pytest.raises(AuthFailed, match="ACL"):
        WRITES[name](producer)

    assert keys_of(client, queue) == [key(queue, "dlq")]


def test_a_user_with_the_rights_of_a_producer_can_do_it_all(
    connect: Connect, user: Callable[..., str], client: redis.Redis, queue: str
) -> None:
    rights = ["+@read", "+@write", "+evalsha", "+eval", "+time", "+ping", "+client"]
    producer = connect(user("~{chasqui:*", *rights), queue=queue)
    put_dead_letter(client, queue, 1)

    assert set(errors_of(WRITES | READS, producer).values()) == {None}
    assert producer.cancel_delayed("i") is False


# A replica


def test_a_replica_is_told_and_can_be_read(connect: Connect, server: EmbeddedServer, start_like: StartLike) -> None:
    replica = start_like(config=[f"replicaof 127.0.0.1 {server.port}"])
    producer = connect(replica.url, queue="q")

    with pytest.raises(ReadOnlyServer, match=rf"127\.0\.0\.1:{replica.port} is a read-only replica.*primary"):
        producer.add(1)

    assert errors_of(WRITES | READS, producer) == dict.fromkeys(ADDS, ReadOnlyServer) | {
        "replay_dlq": None,
        "purge_dlq": None,
        "pause": ReadOnlyServer,
        **dict.fromkeys(READS),
    }


# Memory


def test_a_server_out_of_memory_is_told_and_nothing_is_added(connect: Connect, start_like: StartLike) -> None:
    server = start_like()
    with redis.Redis.from_url(server.url) as client:
        producer = connect(server.url, queue="q")
        producer.add("before")
        client.config_set("maxmemory", 1)

        with pytest.raises(OutOfMemory, match="raise maxmemory"):
            producer.add(1)
        found = errors_of(ADDS, producer)

        assert found == dict.fromkeys(ADDS, OutOfMemory)
        assert keys_of(client, "q") == [key("q", "stream")]
        assert payloads(in_stream(client, "q")) == ["before"]
        client.config_set("maxmemory", 0)
        producer.add("after")
        assert payloads(in_stream(client, "q")) == ["before", "after"]


@pytest.mark.parametrize(
    ("bulk", "command", "nth", "added"),
    [
        pytest.param(lambda p: p.add_bulk(range(600)), "XADD", 301, 300, id="plain"),
        pytest.param(lambda p: p.add_in_bulk(60_000, range(600)), "ZADD", 301, 300, id="delayed"),
        pytest.param(
            lambda p: p.add_bulk_jobs([NewJob(n, id=str(n)) for n in range(600)]), "EVALSHA", 2, 250, id="with ids"
        ),
    ],
)
def test_a_bulk_that_runs_out_of_memory_half_way_tells_which_jobs_are_in(
    connect: Connect, start_like: StartLike, bulk: Use, command: str, nth: int, added: int
) -> None:
    server = start_like()
    assert server.port
    with redis.Redis.from_url(server.url) as client, Proxy(server.port) as proxy:
        producer = connect(proxy.url, queue="q")
        producer.add_bulk_jobs([NewJob("warm", id="warm", delay_ms=1)])
        client.delete(producer.delayed_key)
        proxy.on(command, nth=nth, act=call(lambda: client.config_set("maxmemory", 1)))

        with pytest.raises(BulkInterrupted) as caught:
            bulk(producer)

        error = caught.value
        assert (error.acknowledged, error.unknown) == (added, 0)
        assert error.added == error.ids[:added]
        assert sorted(ids(in_stream(client, "q") + in_delayed(client, "q"))) == sorted(error.added)
        assert isinstance(error.__cause__, OutOfMemory)


def test_a_bulk_whose_reply_was_lost_before_memory_ran_out_does_not_claim_that_nothing_was_added(
    connect: Connect, start_like: StartLike
) -> None:
    server = start_like()
    assert server.port
    with redis.Redis.from_url(server.url) as client, Proxy(server.port) as proxy:
        producer = connect(proxy.url, queue="q")
        proxy.on("ZADD", act=Act(after=lambda: client.config_set("maxmemory", 1), reply=False))

        with pytest.raises(ChasquiError) as caught:
            producer.add_in_bulk(60_000, range(5))

        there = len(in_delayed(client, "q"))
        error = caught.value
        claimed = error.acknowledged + error.unknown if isinstance(error, BulkInterrupted) else 0
        assert there <= claimed, f"{there} jobs are in, the error is {error}"


# Keys of another type

OCCUPIED: list[tuple[str, list[str]]] = [
    ("stream", ["add", "add with id", "add_bulk", "add_bulk_jobs", "replay_dlq", "stats"]),
    ("delayed", ["add_in", "add_in with id", "add_in_bulk", "add_bulk_jobs", "stats"]),
    ("dlq", ["replay_dlq", "purge_dlq", "peek_dlq", "stats"]),
]


@pytest.mark.parametrize(
    ("place", "use"),
    [pytest.param(place, (WRITES | READS)[name], id=f"{place} {name}") for place, names in OCCUPIED for name in names],
)
def test_a_key_of_another_type_is_told_and_nothing_is_written(
    producer: Any, client: redis.Redis, queue: str, place: str, use: Use
) -> None:
    if place != "dlq":
        put_dead_letter(client, queue, 1)
    client.set(key(queue, place), "something else")
    before = {name: client.dump(name) for name in keys_of(client, queue)}

    with pytest.raises(ServerError, match="WRONGTYPE"):
        use(producer)

    assert {name: client.dump(name) for name in keys_of(client, queue)} == before


def test_a_mixed_bulk_whose_second_half_is_refused_tells_that_the_first_is_in(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    client.set(key(queue, "delayed"), "something else")

    with pytest.raises(ChasquiError) as caught:
        producer.add_bulk_jobs([NewJob(1), NewJob(2, delay_ms=60_000), NewJob(3)])

    there = ids(in_stream(client, queue))
    if there:
        assert isinstance(caught.value, BulkInterrupted), f"{len(there)} jobs are in, the error is {caught.value}"
        assert caught.value.added == there
        assert len(caught.value.ids) == 3


# Busy


def test_a_server_that_is_busy_with_a_script_is_waited_for(connect: Connect, start_like: StartLike) -> None:
    server = start_like(config={"lua-time-limit": "1"})
    with redis.Redis.from_url(server.url) as client, ThreadPoolExecutor(2) as threads:
        producer = connect(server.url, queue="q", reconnect_attempts=100)
        producer.add(0)
        script = threads.submit(run_for_ever, server.url)
        eventually(lambda: is_busy(client))

        adding = threads.submit(producer.add, 1, id="i")
        client.script_kill()

        assert adding.result(30) == "i"
        assert script.result(30) == "killed"
        assert producer.stats().waiting == 2
