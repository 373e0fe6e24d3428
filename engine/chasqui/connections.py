"""Making clients: what redis-py needs to reach each kind of deployment."""

from __future__ import annotations

import os
from typing import Any

import redis
import redis.asyncio as aioredis
import redis.exceptions as rx
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from chasqui import embedded
from chasqui.address import DEFAULT_URL, Address, parse
from chasqui.errors import OptionError
from chasqui.options import ConnectionOptions


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
    never = Retry(NoBackoff(), 0)
    if address.kind == "cluster":
        nodes = [redis.cluster.ClusterNode(host, port) for host, port in address.hosts]
        return redis.cluster.RedisCluster(
            startup_nodes=nodes, ssl=address.tls, retry=never, max_connections=options.pool_size, **settings
        )
    if address.kind == "sentinel":
        sentinel = redis.sentinel.Sentinel(
            address.hosts, sentinel_kwargs=_sentinel_settings(options, never), ssl=address.tls, retry=never, **settings
        )
        return sentinel.master_for(address.service)
    pool = redis.BlockingConnectionPool(
        connection_class=_connection_class(address),
        max_connections=options.pool_size,
        timeout=options.socket_timeout_ms / 1000,
        retry=never,
        **_place(address),
        **settings,
    )
    return redis.Redis.from_pool(pool)


def async_client(address: Address, options: ConnectionOptions, settings: dict[str, Any]) -> Any:
    never = AsyncRetry(NoBackoff(), 0)
    if address.kind == "cluster":
        nodes = [aioredis.cluster.ClusterNode(host, port) for host, port in address.hosts]
        return aioredis.cluster.RedisCluster(
            startup_nodes=nodes, ssl=address.tls, retry=never, max_connections=max(16, options.pool_size), **settings
        )
    if address.kind == "sentinel":
        sentinel = aioredis.sentinel.Sentinel(
            address.hosts, sentinel_kwargs=_sentinel_settings(options, never), ssl=address.tls, retry=never, **settings
        )
        return sentinel.master_for(address.service)
    pool = aioredis.BlockingConnectionPool(
        connection_class=_async_connection_class(address),
        max_connections=options.pool_size,
        timeout=options.socket_timeout_ms / 1000,
        retry=never,
        **_place(address),
        **settings,
    )
    return aioredis.Redis.from_pool(pool)


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


async def is_stale(connection: Any) -> bool:
    """Closed by the server while it lay idle, or with something left unread."""
    try:
        return bool(await connection.can_read())
    except (rx.ConnectionError, OSError):
        return True


def sentinels_of(client: Any) -> list[Any]:
    """The connections to sentinels that a client was made from."""
    pool = getattr(client, "connection_pool", None)
    return list(getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()))
