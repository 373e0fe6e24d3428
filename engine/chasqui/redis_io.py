"""The only module that talks to the server: connections by redis-py, and the two drivers of flows.

Connections, authentication, TLS, sentinel and the cluster's slot map are redis-py's. Commands are sent on its
connections directly, for three reasons: raw replies, bytes that are already protocol, and control over what is sent a
second time. redis-py's own retry repeats any command after a lost connection, and an XADD repeated is a job doubled.

The rule here: a step that never left is tried again; one that left, and whose reply was lost, is tried again only when
it says that it is safe. Everything else is the flow's decision.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import hiredis
import redis.exceptions as rx

from chasqui.address import Address
from chasqui.connections import async_client, client, is_stale, resolve, sentinels_of, settings_of
from chasqui.errors import ConnectionLost
from chasqui.options import ConnectionOptions
from chasqui.protocol.flow import Batch, Command, Fed, Feed, Flow, Pause, Refusal, Step
from chasqui.protocol.produce import PASSING
from chasqui.redis_errors import connection_lost, refusal_of, reply_in, told, translated

log = logging.getLogger("chasqui.redis")
T = TypeVar("T")

_MORE = object()
_REDIRECTED = frozenset({"MOVED", "ASK"})
_LOST = (rx.ConnectionError, rx.TimeoutError, rx.RedisClusterException, OSError, asyncio.TimeoutError)


class Link:
    """A pool of connections for blocking code. Threads may share it."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._address = resolve(options)
        self._settings = settings_of(options, self._address)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._client: Any = None

    @property
    def shown(self) -> str:
        return self._address.shown

    def run(self, flow: Flow[T]) -> T:
        """Drive a flow to its end."""
        with translated(self._address):
            reply: Any = None
            error: Exception | None = None
            while True:
                try:
                    step = flow.throw(error) if error is not None else flow.send(reply)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                reply, error = None, None
                try:
                    reply = self._take(step)
                except (Refusal, ConnectionLost) as raised:
                    error = raised

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            for sentinel in sentinels_of(client):
                sentinel.close()
            client.close()

    def _take(self, step: Step) -> Any:
        if isinstance(step, Pause):
            time.sleep(_pause_s(step, self._options))
            return None
        sent = False
        for attempt in range(self._options.reconnect_attempts + 1):
            try:
                return self._feed(step) if isinstance(step, Feed) else self._exchange(step)
            except ConnectionLost as lost:
                sent = sent or lost.sent
                if (sent and not _safe(step)) or attempt == self._options.reconnect_attempts:
                    raise told(lost, sent=sent) from None
                log.info("%s; trying again (%d)", lost.message, attempt + 1)
                self._start_over()
            except Refusal as refusal:
                if not _passes(refusal, self._address) or attempt == self._options.reconnect_attempts:
                    raise
                self._forget_topology()
            time.sleep(backoff_s(attempt, self._options))
        raise AssertionError("unreachable")

    def _exchange(self, step: Command | Batch) -> Any:
        commands = step.commands if isinstance(step, Batch) else (step,)
        if not commands:
            return []
        key = _key_of(commands)
        replies = self._talk(key, commands)
        for attempt in range(self._options.reconnect_attempts):
            refused = _redirected(replies)
            if not refused:
                break
            self._forget_topology(key)
            time.sleep(backoff_s(attempt, self._options) if attempt else 0)
            for i, reply in zip(refused, self._talk(key, tuple(commands[i] for i in refused)), strict=True):
                replies[i] = reply
        return replies if isinstance(step, Batch) else _single(replies[0])

    def _talk(self, key: str | None, commands: tuple[Command, ...]) -> list[Any]:
        with self._connection(key) as (connection, mark_sent):
            packed = [hiredis.pack_command(c.args) for c in commands]  # type: ignore[arg-type]
            mark_sent()
            connection.send_packed_command(packed)
            return [_read(connection) for _ in commands]

    def _feed(self, feed: Feed) -> Fed:
        replies: list[Refusal | None] = []
        sent = 0
        try:
            with self._connection(feed.key) as (connection, mark_sent):
                read = _reader(connection)
                for piece, count in feed.pieces():
                    mark_sent()
                    sent += count
                    connection.send_packed_command([piece])
                    if sent - len(replies) >= feed.window and read(replies, len(replies) + count):
                        break
                read(replies, sent)
        except ConnectionLost as lost:
            return Fed(replies, sent, lost)
        if _any_passing(replies):
            self._forget_topology(feed.key)
        return Fed(replies, sent)

    @contextmanager
    def _connection(self, key: str | None) -> Iterator[tuple[Any, Callable[[], None]]]:
        """A connection to the server that has that key, given back clean or closed."""
        sent = False

        def mark_sent() -> None:
            nonlocal sent
            sent = True

        try:
            pool = self._pool(key)
            connection = pool.get_connection()
        except _LOST as error:
            raise connection_lost(error, self._address, sent=False) from None
        clean = False
        try:
            yield connection, mark_sent
            clean = True
        except _LOST as error:
            raise connection_lost(error, self._address, sent=sent) from None
        finally:
            # Half-read replies would answer the next command: such a connection is closed, not given back.
            if not clean:
                connection.disconnect()
            pool.release(connection)

    def _pool(self, key: str | None) -> Any:
        client = self._connected()
        if self._address.kind != "cluster":
            return client.connection_pool
        node = client.get_default_node() if key is None else client.get_node_from_key(key)
        return client.get_redis_connection(node).connection_pool

    def _connected(self) -> Any:
        if self._client is None or self._pid != os.getpid():
            with self._lock:
                if self._client is None or self._pid != os.getpid():
                    # A forked child must not talk on its parent's sockets.
                    self._pid = os.getpid()
                    self._client = client(self._address, self._options, self._settings)
        return self._client

    def _start_over(self) -> None:
        """A node of a cluster is gone: another has its slots by now, or soon. Ask the nodes of the url again."""
        if self._address.kind == "cluster":
            self.close()

    def _forget_topology(self, key: str | None = None) -> None:
        """After a redirection or a failover: let redis-py look again. Its cluster client follows a redirection of any
        command, and remembers where it led.
        """
        if self._address.kind == "cluster":
            try:
                self._connected().execute_command("TYPE", key or "chasqui")
            except (rx.RedisError, rx.RedisClusterException, OSError):
                self._start_over()
        elif self._address.kind == "sentinel":
            self._connected().connection_pool.disconnect()


class AsyncLink:
    """A pool of connections for asyncio code; belongs to the event loop that first uses it."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._address = resolve(options)
        self._settings = settings_of(options, self._address)
        # One time-out around a whole exchange is ours to set; redis-py would arm a timer for every reply.
        self._settings["socket_timeout"] = None
        self._client: Any = None

    @property
    def shown(self) -> str:
        return self._address.shown

    async def run(self, flow: Flow[T]) -> T:
        """Drive a flow to its end."""
        with translated(self._address):
            reply: Any = None
            error: Exception | None = None
            while True:
                try:
                    step = flow.throw(error) if error is not None else flow.send(reply)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                reply, error = None, None
                try:
                    reply = await self._take(step)
                except (Refusal, ConnectionLost) as raised:
                    error = raised

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            for sentinel in sentinels_of(client):
                await sentinel.aclose()
            await client.aclose()

    async def _take(self, step: Step) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(_pause_s(step, self._options))
            return None
        sent = False
        for attempt in range(self._options.reconnect_attempts + 1):
            try:
                return await (self._feed(step) if isinstance(step, Feed) else self._exchange(step))
            except ConnectionLost as lost:
                sent = sent or lost.sent
                if (sent and not _safe(step)) or attempt == self._options.reconnect_attempts:
                    raise told(lost, sent=sent) from None
                log.info("%s; trying again (%d)", lost.message, attempt + 1)
                await self._start_over()
            except Refusal as refusal:
                if not _passes(refusal, self._address) or attempt == self._options.reconnect_attempts:
                    raise
                await self._forget_topology()
            await asyncio.sleep(backoff_s(attempt, self._options))
        raise AssertionError("unreachable")

    async def _exchange(self, step: Command | Batch) -> Any:
        commands = step.commands if isinstance(step, Batch) else (step,)
        if not commands:
            return []
        key = _key_of(commands)
        replies = await self._talk(key, step.wait_ms, commands)
        for attempt in range(self._options.reconnect_attempts):
            refused = _redirected(replies)
            if not refused:
                break
            await self._forget_topology(key)
            await asyncio.sleep(backoff_s(attempt, self._options) if attempt else 0)
            again = await self._talk(key, step.wait_ms, tuple(commands[i] for i in refused))
            for i, reply in zip(refused, again, strict=True):
                replies[i] = reply
        return replies if isinstance(step, Batch) else _single(replies[0])

    async def _talk(self, key: str | None, wait_ms: int, commands: tuple[Command, ...]) -> list[Any]:
        async def talk(connection: Any, mark_sent: Callable[[], None]) -> list[Any]:
            packed = [hiredis.pack_command(c.args) for c in commands]  # type: ignore[arg-type]
            mark_sent()
            await connection.send_packed_command(packed)
            return [await _aread(connection) for _ in commands]

        return await self._with_connection(key, wait_ms, talk)

    async def _feed(self, feed: Feed) -> Fed:
        replies: list[Refusal | None] = []
        sent = 0

        async def talk(connection: Any, mark_sent: Callable[[], None]) -> None:
            nonlocal sent
            read = _async_reader(connection)
            for piece, count in feed.pieces():
                mark_sent()
                sent += count
                await connection.send_packed_command([piece])
                if sent - len(replies) >= feed.window and await read(replies, len(replies) + count):
                    break
            await read(replies, sent)

        try:
            await self._with_connection(feed.key, 0, talk)
        except ConnectionLost as lost:
            return Fed(replies, sent, lost)
        if _any_passing(replies):
            await self._forget_topology(feed.key)
        return Fed(replies, sent)

    async def _with_connection(
        self, key: str | None, wait_ms: int, talk: Callable[[Any, Callable[[], None]], Awaitable[T]]
    ) -> T:
        """Talk on a connection to the server that has that key, given back clean or closed, also when cancelled."""
        sent = False

        def mark_sent() -> None:
            nonlocal sent
            sent = True

        try:
            take, give_back = await self._checkout(key)
            connection = await take()
        except _LOST as error:
            raise connection_lost(error, self._address, sent=False) from None
        clean = False
        try:
            async with asyncio.timeout((self._options.socket_timeout_ms + wait_ms) / 1000):
                result = await talk(connection, mark_sent)
            clean = True
            return result
        except _LOST as error:
            raise connection_lost(error, self._address, sent=sent) from None
        finally:
            if not clean:
                await connection.disconnect(nowait=True)
            await give_back(connection)

    async def _checkout(self, key: str | None) -> tuple[Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]]:
        client = self._connected()
        if self._address.kind != "cluster":
            return client.connection_pool.get_connection, client.connection_pool.release
        await client.initialize()
        node = client.get_default_node() if key is None else client.get_node_from_key(key)

        async def take() -> Any:
            connection = node.acquire_connection()
            try:
                await connection.connect()
                if await is_stale(connection):
                    await connection.disconnect()
                    await connection.connect()
            except BaseException:
                node.release(connection)
                raise
            return connection

        async def give_back(connection: Any) -> None:
            node.release(connection)

        return take, give_back

    def _connected(self) -> Any:
        if self._client is None:
            self._client = async_client(self._address, self._options, self._settings)
        return self._client

    async def _start_over(self) -> None:
        if self._address.kind == "cluster":
            await self.close()

    async def _forget_topology(self, key: str | None = None) -> None:
        if self._address.kind == "cluster":
            try:
                await self._connected().execute_command("TYPE", key or "chasqui")
            except (rx.RedisError, rx.RedisClusterException, OSError):
                await self._start_over()
        elif self._address.kind == "sentinel":
            await self._connected().connection_pool.disconnect(inuse_connections=False)


def backoff_s(attempt: int, options: ConnectionOptions) -> float:
    """Capped exponential wait with jitter: between half and all of it, so that a fleet does not return as one."""
    ceiling = min(options.reconnect_max_ms, options.reconnect_initial_ms * 2 ** min(attempt, 30))
    return float(ceiling * random.uniform(0.5, 1.0) / 1000)


def _pause_s(pause: Pause, options: ConnectionOptions) -> float:
    return pause.ms / 1000 if pause.attempt is None else backoff_s(pause.attempt, options)


def _key_of(commands: tuple[Command, ...]) -> str | None:
    """The key that routes a step in a cluster: all keys of a step belong to one queue, hence to one slot."""
    for command in commands:
        for arg in command.args[1:]:
            if isinstance(arg, str) and arg.startswith("{"):
                return arg
    return None


def _redirected(replies: list[Any]) -> list[int]:
    """Commands refused because their slot is, or is moving, elsewhere in the cluster: not carried out."""
    return [i for i, reply in enumerate(replies) if isinstance(reply, Refusal) and reply.code in _REDIRECTED]


def _read(connection: Any) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except rx.ResponseError as error:
        return refusal_of(error)
    except rx.ConnectionError as error:
        raise reply_in(error) from None


def _problem(reply: Any) -> Refusal | None:
    return reply if isinstance(reply, Refusal) else None


def _reader(connection: Any) -> Callable[[list[Refusal | None], int], bool]:
    """Reads replies of a feed into a list until it has that many; True when one of them is a refusal.

    A reply costs redis-py as much as an XADD costs the server. Where the connection lets us have its socket the
    replies are parsed here, many at a time, by the same parser.
    """
    sock = getattr(connection, "feed_socket", None)
    if sock is None:

        def one_by_one(replies: list[Refusal | None], until: int) -> bool:
            refused = False
            while len(replies) < until:
                replies.append(_problem(_read(connection)))
                refused |= replies[-1] is not None
            return refused

        return one_by_one

    take = _parser_of_many()

    def many(replies: list[Refusal | None], until: int) -> bool:
        refused = False
        while len(replies) < until:
            refused |= take(sock.recv(1 << 16), replies)
        return refused

    return many


def _async_reader(connection: Any) -> Callable[[list[Refusal | None], int], Awaitable[bool]]:
    """The same for asyncio."""
    stream = getattr(connection, "feed_stream", None)
    take = _parser_of_many()

    async def read(replies: list[Refusal | None], until: int) -> bool:
        refused = False
        while len(replies) < until:
            if stream is None:
                replies.append(_problem(await _aread(connection)))
                refused |= replies[-1] is not None
            else:
                refused |= take(await stream.read(1 << 16), replies)
        return refused

    return read


def _parser_of_many() -> Callable[[bytes, list[Refusal | None]], bool]:
    """Bytes as they come -> replies, None for those that are no refusals; True when one is."""
    parser = hiredis.Reader(replyError=lambda text: refusal_of(rx.ResponseError(text)), notEnoughData=_MORE)
    gets = parser.gets

    def take(data: bytes, replies: list[Refusal | None]) -> bool:
        if not data:
            raise ConnectionResetError("closed by the server")
        parser.feed(data)
        found = [reply if type(reply) is Refusal else None for reply in iter(gets, _MORE)]
        replies += found
        return found.count(None) != len(found)

    return take


async def _aread(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except rx.ResponseError as error:
        return refusal_of(error)
    except rx.ConnectionError as error:
        raise reply_in(error) from None


def _single(reply: Any) -> Any:
    if isinstance(reply, Refusal):
        raise reply
    return reply


def _any_passing(replies: list[Refusal | None]) -> bool:
    return replies.count(None) != len(replies) and any(r is not None and r.code in PASSING for r in replies)


def _safe(step: Step) -> bool:
    return isinstance(step, Command | Batch) and step.safe


def _passes(refusal: Refusal, address: Address) -> bool:
    """A refusal that goes away by itself. READONLY does where a failover is under way and the topology is known."""
    return refusal.code in PASSING or (refusal.code == "READONLY" and address.kind != "single")
