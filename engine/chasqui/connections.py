"""Making clients: what redis-py needs to reach each kind of deployment."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from chasqui import embedded
from chasqui.address import DEFAULT_URL, Address, parse
from chasqui.errors import OptionError
from chasqui.options import ConnectionOptions
from chasqui.protocol.slots import Place, SlotMap


def resolve(options: ConnectionOptions) -> Address:
    """The address that the options mean, the environment and the default included. May start the embedded server."""
    address = parse(options.url or os.environ.get("CHASQUI_URL") or DEFAULT_URL)
    if address.kind == "embedded":
        return parse(embedded.shared().url)
    return address


def settings_of(options: ConnectionOptions, address: Address) -> dict[str, Any]:
    """What redis-py takes for every connection: RESP2 and bytes, so that replies look the same everywhere."""
    settings: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": options.socket_timeout_ms / 1000,
        "socket_connect_timeout": options.connect_timeout_ms / 1000,
        "username": address.username,
        "password": address.password,
    }
    if address.kind != "cluster":
        settings["db"] = address.db
    if not address.path:
        settings["socket_keepalive"] = True
    if address.tls:
        settings |= {
            "ssl_ca_certs": options.tls_ca,
            "ssl_certfile": options.tls_cert,
            "ssl_keyfile": options.tls_key,
        }
    elif options.tls_ca or options.tls_cert or options.tls_key:
        raise OptionError("tls_ca, tls_cert and tls_key go with a rediss:// url, and this one is not")
    return settings


def client(address: Address, options: ConnectionOptions, settings: dict[str, Any]) -> Any:
    settings = {**settings, "redis_connect_func": _come_in}
    if address.kind == "cluster":
        return Nodes(address, options, settings)
    if address.kind == "sentinel":
        never = Retry(NoBackoff(), 0)
        sentinel = redis.sentinel.Sentinel(
            address.hosts, sentinel_kwargs=_sentinel_settings(options, never), ssl=address.tls, retry=never, **settings
        )
        return sentinel.master_for(address.service)
    return redis.Redis.from_pool(redis.BlockingConnectionPool(**_pool_settings(address, options), **settings))


def async_client(address: Address, options: ConnectionOptions, settings: dict[str, Any]) -> Any:
    settings = {**settings, "redis_connect_func": _acome_in}
    if address.kind == "cluster":
        return AsyncNodes(address, options, settings)
    if address.kind == "sentinel":
        never = AsyncRetry(NoBackoff(), 0)
        sentinel = aioredis.sentinel.Sentinel(
            address.hosts, sentinel_kwargs=_sentinel_settings(options, never), ssl=address.tls, retry=never, **settings
        )
        return sentinel.master_for(address.service)
    return aioredis.Redis.from_pool(
        aioredis.BlockingConnectionPool(**_async_pool_settings(address, options), **settings)
    )


def _come_in(connection: Any) -> None:
    """What redis-py does with a fresh connection, then a question that only those who were let in may ask.

    A server hangs up on a stranger that sends much, and its refusal may be lost with the connection: nothing would tell
    then that none of what was sent is in. ``echoes``: replies can be read as bytes there, up to the echo of a PING.
    """
    connection.echoes = False
    connection.on_connect()
    connection.send_command("PING", check_health=False)
    with suppress(redis.ResponseError):
        connection.read_response()
        connection.echoes = hasattr(connection, "feed_socket")


async def _acome_in(connection: Any) -> None:
    await connection.on_connect()
    await connection.send_command("PING", check_health=False)
    with suppress(redis.ResponseError):
        await connection.read_response()


class Nodes:
    """The nodes of a cluster: which of them has which slot, and connections to those that we talk to.

    A node that leaves the cluster is dropped: its idle connections are closed at once, those in use when they are given
    back. Threads may share this.
    """

    def __init__(self, address: Address, options: ConnectionOptions, settings: dict[str, Any]) -> None:
        self.slots = SlotMap(address.hosts)
        self.asking = threading.Lock()
        self._settings = {**_pool_settings(address, options), **settings}
        self._pools: dict[Place, _NodePool] = {}

    def pool(self, place: Place) -> Any:
        found = self._pools.get(place)
        if found is None:
            found = self._pools.setdefault(place, _NodePool(self.slots, place, self._settings))
        return found

    def drop(self, places: Iterable[Place]) -> None:
        for place in places:
            pool = self._pools.pop(place, None)
            if pool is not None:
                pool.dropped = True
                pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.dropped = True
            pool.disconnect()


class AsyncNodes:
    """The same for asyncio."""

    def __init__(self, address: Address, options: ConnectionOptions, settings: dict[str, Any]) -> None:
        self.slots = SlotMap(address.hosts)
        self.asking = asyncio.Lock()
        self._settings = {**_async_pool_settings(address, options), **settings}
        self._pools: dict[Place, _AsyncNodePool] = {}

    def pool(self, place: Place) -> Any:
        found = self._pools.get(place)
        if found is None:
            found = self._pools[place] = _AsyncNodePool(self.slots, place, self._settings)
        return found

    async def drop(self, places: Iterable[Place]) -> None:
        for place in places:
            pool = self._pools.pop(place, None)
            if pool is not None:
                pool.dropped = True
                await pool.disconnect(inuse_connections=False)

    async def aclose(self) -> None:
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.dropped = True
            await pool.disconnect()


class _NodePool(redis.BlockingConnectionPool):
    """Connections to one node, which know of the map that led to it."""

    def __init__(self, slots: SlotMap, place: Place, settings: dict[str, Any]) -> None:
        super().__init__(**(settings | {"host": place[0], "port": place[1]}))
        self.slots, self.place, self.dropped = slots, place, False

    def release(self, connection: Any) -> None:
        if self.dropped:
            connection.disconnect()
        super().release(connection)


class _AsyncNodePool(aioredis.BlockingConnectionPool):
    def __init__(self, slots: SlotMap, place: Place, settings: dict[str, Any]) -> None:
        super().__init__(**(settings | {"host": place[0], "port": place[1]}))
        self.slots, self.place, self.dropped = slots, place, False

    async def release(self, connection: Any) -> None:
        if self.dropped:
            await connection.disconnect()
        await super().release(connection)


class _WithSocket:
    """Keeps the socket that a connection makes, for feeds."""

    def _connect(self) -> Any:
        self.feed_socket = super()._connect()  # type: ignore[misc]
        return self.feed_socket


class _TcpConnection(_WithSocket, redis.Connection):
    pass


class _TlsConnection(_WithSocket, redis.SSLConnection):
    pass


class _UnixConnection(_WithSocket, redis.UnixDomainSocketConnection):
    pass


def _connection_class(address: Address) -> Any:
    if address.path:
        return _UnixConnection
    return _TlsConnection if address.tls else _TcpConnection


class _WithStream:
    """Keeps the stream that a connection reads from, for feeds."""

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[misc]
        self.feed_stream = getattr(self, "_reader", None)


class _AsyncTcpConnection(_WithStream, aioredis.Connection):
    pass


class _AsyncTlsConnection(_WithStream, aioredis.SSLConnection):
    pass


class _AsyncUnixConnection(_WithStream, aioredis.UnixDomainSocketConnection):
    pass


def _async_connection_class(address: Address) -> Any:
    if address.path:
        return _AsyncUnixConnection
    return _AsyncTlsConnection if address.tls else _AsyncTcpConnection


def _pool_settings(address: Address, options: ConnectionOptions) -> dict[str, Any]:
    """What makes a pool: where to, with how many connections, and how long to wait for one."""
    return {
        **_place(address),
        "connection_class": _connection_class(address),
        "max_connections": options.pool_size,
        "timeout": options.socket_timeout_ms / 1000,
        "retry": Retry(NoBackoff(), 0),
    }


def _async_pool_settings(address: Address, options: ConnectionOptions) -> dict[str, Any]:
    kind, never = _async_connection_class(address), AsyncRetry(NoBackoff(), 0)
    return _pool_settings(address, options) | {"connection_class": kind, "retry": never}


def _place(address: Address) -> dict[str, Any]:
    if address.path:
        return {"path": address.path}
    (host, port), *_ = address.hosts
    return {"host": host, "port": port}


def _sentinel_settings(options: ConnectionOptions, retry: Any) -> dict[str, Any]:
    return {
        "retry": retry,
        "protocol": 2,
        "password": options.sentinel_password,
        "socket_timeout": options.connect_timeout_ms / 1000,
        "socket_connect_timeout": options.connect_timeout_ms / 1000,
    }


def sentinels_of(client: Any) -> list[Any]:
    """The connections to sentinels that a client was made from."""
    pool = getattr(client, "connection_pool", None)
    return list(getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()))
