"""What the server can do, asked for in two ways, and compared with what it does for a plain client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from chasqui.options import ConnectionOptions
from chasqui.protocol.capabilities import Capabilities, probe
from chasqui.protocol.keys import Keys
from chasqui.redis_io import AsyncLink, Link
from tests.conftest import is_redis_6
from tests.engine.seen import keys_of


def probed(url: str, queue: str) -> Capabilities:
    link = Link(ConnectionOptions(url=url))
    try:
        return link.run(probe(Keys(queue)))
    finally:
        link.close()


def understood(client: redis.Redis, *command: str | int) -> bool:
    """Whether the server carries it out; a missing group is no misunderstanding."""
    try:
        client.execute_command(*command)
    except redis.ResponseError as error:
        return str(error).startswith("NOGROUP")
    return True


@pytest.fixture
def truth(client: redis.Redis, queue: str) -> Iterator[Capabilities]:
    """Found out by doing it, on a key that does exist."""
    scratch = f"scratch-{queue}"
    client.xadd(scratch, {"f": "v"})
    client.xgroup_create(scratch, "g", "0")
    yield Capabilities(
        ack_delete=understood(client, "XACKDEL", scratch, "g", "IDS", 1, "1-1"),
        claim_on_read=understood(client, "XREADGROUP", "GROUP", "g", "c", "CLAIM", 1, "STREAMS", scratch, ">"),
        idempotent_add=understood(client, "XADD", scratch, "IDMP", "p", "i", "*", "f", "v"),
    )
    client.delete(scratch)


@pytest.fixture
def reader(client: redis.Redis, url: str) -> Iterator[str]:
    """The url of a user who may not ask for the documentation, so that the probe has to try."""
    docs = "-command" if is_redis_6(client) else "-command|docs"
    client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", docs)
    yield url.replace("redis://", "redis://reader:secret@")
    client.execute_command("ACL", "DELUSER", "reader")


def test_the_probe_tells_what_the_server_does(url: str, queue: str, truth: Capabilities) -> None:
    assert probed(url, queue) == truth


def test_trying_agrees_with_the_documentation(
    client: redis.Redis, url: str, reader: str, queue: str, truth: Capabilities
) -> None:
    docs_before = calls(client, "command|docs")

    tried = probed(reader, queue)

    assert calls(client, "command|docs") == docs_before
    assert tried == truth == probed(url, queue)


def calls(client: redis.Redis, command: str) -> int:
    return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def test_the_probe_leaves_no_key(client: redis.Redis, url: str, reader: str, queue: str) -> None:
    probed(url, queue)
    probed(reader, queue)

    assert keys_of(client, queue) == []


def test_a_user_who_may_not_use_a_command_is_told_that_the_server_cannot(
    client: redis.Redis, reader: str, queue: str
) -> None:
    client.execute_command("ACL", "SETUSER", "reader", "-@write")

    assert probed(reader, queue) == Capabilities(False, False, False)


def test_both_colours_find_the_same(url: str, queue: str, truth: Capabilities) -> None:
    async def ask() -> Capabilities:
        link = AsyncLink(ConnectionOptions(url=url))
        try:
            return await link.run(probe(Keys(queue)))
        finally:
            await link.close()

    assert asyncio.run(ask()) == truth


def test_redis_from_8_6_on_can_do_all_three_and_older_servers_and_valkey_none(
    client: redis.Redis, url: str, queue: str
) -> None:
    server = client.info("server")
    is_redis = server.get("server_name", "redis") == "redis"
    recent = tuple(map(int, server["redis_version"].split(".")[:2])) >= (8, 6)
    expected = is_redis and recent

    assert probed(url, queue) == Capabilities(expected, expected, expected)
