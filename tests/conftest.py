"""Servers and queues for all tests. Every test that takes ``url`` runs once per server that is present."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from chasqui import embedded

# Keys that a queue keeps by design; anything else must expire by itself.
PERMANENT = (":stream", ":delayed", ":dlq", ":events", ":repeat", ":paused")


def server_binaries() -> dict[str, str | None]:
    """Servers to test on, by name: the embedded one, the one on PATH, and those of CHASQUI_TEST_SERVERS."""
    found: dict[str, str | None] = {"valkey": None}
    on_path = shutil.which("redis-server")
    if on_path:
        found["redis-path"] = on_path
    for path in filter(None, os.environ.get("CHASQUI_TEST_SERVERS", "").split(":")):
        found[Path(path).parent.name or Path(path).name] = path
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        metafunc.parametrize("server", list(server_binaries()), indirect=True, scope="session")


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, embedded.EmbeddedServer]]:
    started: dict[str, embedded.EmbeddedServer] = {}
    yield started
    for server in started.values():
        server.stop()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, _servers: dict[str, embedded.EmbeddedServer]) -> embedded.EmbeddedServer:
    """A running server, shared by the session: tests that stop or fill it start one of their own."""
    name: str = request.param
    if name not in _servers:
        _servers[name] = embedded.start(binary=server_binaries()[name])
    return _servers[name]


@pytest.fixture
def url(server: embedded.EmbeddedServer) -> str:
    return server.url


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    """A plain redis-py client, to look from outside."""
    with redis.Redis.from_url(url, protocol=2) as plain:
        yield plain


@pytest.fixture
def queue(client: redis.Redis) -> Iterator[str]:
    """A queue name of the test's own; afterwards no key may be left that would stay for ever, and all are removed."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    yield name
    keys = list(client.scan_iter(match=f"{{chasqui:{name}}}*", count=1000))
    leaked = [
        key
        for key in keys
        if client.ttl(key) == -1 and not key.decode().endswith(PERMANENT) and b":repeat:spec:" not in key
    ]
    if keys:
        client.delete(*keys)
    assert not leaked, f"keys without expiry: {leaked}"


def is_redis_6(client: redis.Redis) -> bool:
    return int(client.info("server")["redis_version"].partition(".")[0]) < 7


def skip_before_redis_7(client: redis.Redis, what: str) -> None:
    """For rules and counters that came with Redis 7.0."""
    if is_redis_6(client):
        pytest.skip(f"Redis 6.2 has no {what}")
