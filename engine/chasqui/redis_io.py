"""The only module that talks to the server: connections by redis-py, and the two drivers of flows.

Connections, authentication, TLS and sentinel are redis-py's; the cluster's slot map is ours (``protocol/slots.py`` says
why). Commands are sent on its connections directly, for three reasons: raw replies, bytes that are already protocol,
and control over what is sent a second time. redis-py's own retry repeats any command after a lost connection, and an
XADD repeated is a job doubled.

The rule here: a step that never left is tried again; one that left, and whose reply was lost, is tried again only when
it says that it is safe; what a node of a cluster refused because the slot is elsewhere goes there. Everything else is
the flow's decision.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import hiredis
import redis.exceptions as rx

from chasqui.address import Address
from chasqui.connections import AsyncNodes, Nodes, async_client, client, resolve, sentinels_of, settings_of
from chasqui.errors import ConnectionLost
from chasqui.options import ConnectionOptions
from chasqui.protocol.flow import Fed, Feed, Flow, Pause, Refusal, Step, TooLong
from chasqui.protocol.observe import ping
from chasqui.protocol.produce import PASSING
from chasqui.protocol.slots import ASK_FOR_SLOTS, Place, SlotMap, slot_of
from chasqui.redis_errors import connection_lost, refusal_of, reply_in, translated, typed
from chasqui.tries import Tries, backoff_s, single

log = logging.getLogger("chasqui.redis")
T = TypeVar("T")

_MORE = object()
_ASK_FOR_SLOTS = hiredis.pack_command(ASK_FOR_SLOTS)  # type: ignore[arg-type]
_LOST = (rx.ConnectionError, rx.TimeoutError, rx.InvalidResponse, OSError, asyncio.TimeoutError)


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

    def ping(self) -> None:
        """Reach the server: what is in the way is raised here, and not by the first thing that is asked."""
        self.run(ping())

    @property
    def clustered(self) -> bool:
        """Whether a step reaches only the keys of one slot."""
        return self._address.kind == "cluster"

    def primaries(self) -> list[str | None]:
        """One key for each server that holds keys of its own, to route commands by; None where there is only one."""
        if not self.clustered:
            return [None]
        with translated(self._address):
            nodes = self._connected()
            if _known(nodes.slots, "{0}") is None:
                self._learn(nodes, "{0}")
            places = nodes.slots.primaries()
            found: dict[Place, str | None] = {}
            # Any key of a node's slots names it. Slots lie in long runs, so that a few thousand keys meet them all.
            for i in range(100_000):
                if len(found) == len(places):
                    break
                owner = nodes.slots.owner(slot_of(f"{{{i}}}"))
                if owner is not None:
                    found.setdefault(owner, f"{{{i}}}")
            return list(found.values())

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
        tries = Tries(step, self._options, self._address)
        while True:
            try:
                if isinstance(step, Feed):
                    tries.fed(self._feed(step, tries))
                else:
                    tries.answered(self._talk(tries))
            except ConnectionLost as lost:
                tries.lost(lost)
            except Refusal as refusal:
                tries.refused(refusal)
            if tries.look_again:
                self._look_again()
            if tries.over:
                return tries.result()
            if tries.wait_s:
                time.sleep(tries.wait_s)

    def _talk(self, tries: Tries) -> list[Any]:
        packed = tries.packed()
        if not packed:
            return []
        pool = self._pool(tries)
        with self._connection(pool) as (connection, mark_sent):
            mark_sent()
            if tries.as_bytes and connection.echoes:
                replies = [_read_bytes(connection, packed, tries.as_bytes)]
            else:
                connection.send_packed_command(packed)
                replies = [_read(connection) for _ in packed]
        return tries.heard(replies, pool)

    def _feed(self, feed: Feed, tries: Tries) -> Fed:
        replies: list[Refusal | None] = []
        sent = 0
        try:
            pool = self._pool(tries)
            with self._connection(pool) as (connection, mark_sent):
                read = _reader(connection)
                for piece, count in tries.pieces(feed):
                    mark_sent()
                    sent += count
                    connection.send_packed_command([piece])
                    if sent - len(replies) >= feed.window and read(replies, len(replies) + count):
                        break
                read(replies, sent)
        except (ConnectionLost, Refusal) as stopped:
            return tries.cut_off(replies, sent, stopped)
        return tries.taken(replies, sent, pool)

    @contextmanager
    def _connection(self, pool: Any) -> Iterator[tuple[Any, Callable[[], None]]]:
        """A connection out of the pool, given back clean or closed."""
        sent = False

        def mark_sent() -> None:
            nonlocal sent
            sent = True

        try:
            connection = pool.get_connection()
        except _LOST as error:
            _doubt(pool)
            raise connection_lost(error, self._address, sent=False) from None
        clean = False
        try:
            yield connection, mark_sent
            clean = True
        except _LOST as error:
            _doubt(pool)
            raise connection_lost(error, self._address, sent=sent) from None
        finally:
            # Half-read replies would answer the next command: such a connection is closed, not given back.
            if not clean:
                connection.disconnect()
            pool.release(connection)

    def _pool(self, tries: Tries) -> Any:
        """Connections to the server that has the step's key."""
        client = self._connected()
        if self._address.kind != "cluster":
            return client.connection_pool
        return client.pool(tries.ask or _known(client.slots, tries.key) or self._learn(client, tries.key))

    def _learn(self, nodes: Nodes, key: str | None) -> Place:
        """Ask the nodes, one after the other, until one knows who has the key."""
        with nodes.asking:  # one thread asks, and the others read what it was told
            place = _known(nodes.slots, key)
            problem: Exception = ConnectionLost(_nobody_has(key, self._address), sent=False)
            for asked in _in_turn(nodes.slots) if place is None else ():
                try:
                    with self._connection(nodes.pool(asked)) as (connection, _):
                        connection.send_packed_command([_ASK_FOR_SLOTS])
                        reply = single(_read(connection))
                except (ConnectionLost, Refusal) as error:
                    problem = _not_told(error, self._address)
                    continue
                nodes.drop(nodes.slots.learn(reply, asked))
                place = _known(nodes.slots, key)
                if place is not None:
                    break
            if place is None:
                raise problem
            return place

    def _connected(self) -> Any:
        if self._client is None or self._pid != os.getpid():
            with self._lock:
                if self._client is None or self._pid != os.getpid():
                    # A forked child must not talk on its parent's sockets.
                    self._pid = os.getpid()
                    self._client = client(self._address, self._options, self._settings)
        return self._client

    def _look_again(self) -> None:
        """The server refuses for a reason that passes, a failover perhaps: let the next connection be made anew."""
        if self._address.kind == "cluster":
            self._connected().slots.forget()
        else:
            # Not those in use: another thread may be waiting for the answer to something that must not be sent again.
            self._connected().connection_pool.disconnect(inuse_connections=False)


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
        tries = Tries(step, self._options, self._address)
        while True:
            try:
                if isinstance(step, Feed):
                    tries.fed(await self._feed(step, tries))
                else:
                    tries.answered(await self._talk(tries))
            except ConnectionLost as lost:
                tries.lost(lost)
            except Refusal as refusal:
                tries.refused(refusal)
            if tries.look_again:
                await self._look_again()
            if tries.over:
                return tries.result()
            if tries.wait_s:
                await asyncio.sleep(tries.wait_s)

    async def _talk(self, tries: Tries) -> list[Any]:
        packed = tries.packed()
        if not packed:
            return []

        async def talk(connection: Any, mark_sent: Callable[[], None]) -> list[Any]:
            mark_sent()
            await connection.send_packed_command(packed)
            return [await _aread(connection) for _ in packed]

        pool = await self._pool(tries)
        return tries.heard(await self._with_connection(pool, tries.wait_ms, talk), pool)

    async def _feed(self, feed: Feed, tries: Tries) -> Fed:
        replies: list[Refusal | None] = []
        sent = 0

        async def talk(connection: Any, mark_sent: Callable[[], None]) -> None:
            nonlocal sent
            read = _async_reader(connection)
            for piece, count in tries.pieces(feed):
                mark_sent()
                sent += count
                await connection.send_packed_command([piece])
                if sent - len(replies) >= feed.window and await read(replies, len(replies) + count):
                    break
            await read(replies, sent)

        try:
            pool = await self._pool(tries)
            await self._with_connection(pool, 0, talk)
        except (ConnectionLost, Refusal) as stopped:
            return tries.cut_off(replies, sent, stopped)
        return tries.taken(replies, sent, pool)

    async def _with_connection(
        self, pool: Any, wait_ms: int, talk: Callable[[Any, Callable[[], None]], Awaitable[T]]
    ) -> T:
        """Talk on a connection out of the pool, given back clean or closed, also when cancelled."""
        sent = False

        def mark_sent() -> None:
            nonlocal sent
            sent = True

        try:
            async with asyncio.timeout((self._options.connect_timeout_ms + self._options.socket_timeout_ms) / 1000):
                connection = await pool.get_connection()
        except _LOST as error:
            _doubt(pool)
            raise connection_lost(error, self._address, sent=False) from None
        clean = False
        try:
            async with asyncio.timeout((self._options.socket_timeout_ms + wait_ms) / 1000):
                result = await talk(connection, mark_sent)
            clean = True
            return result
        except _LOST as error:
            _doubt(pool)
            raise connection_lost(error, self._address, sent=sent) from None
        finally:
            if not clean:
                await connection.disconnect(nowait=True)
            await pool.release(connection)

    async def _pool(self, tries: Tries) -> Any:
        client = self._connected()
        if self._address.kind != "cluster":
            return client.connection_pool
        return client.pool(tries.ask or _known(client.slots, tries.key) or await self._learn(client, tries.key))

    async def _learn(self, nodes: AsyncNodes, key: str | None) -> Place:
        async def ask(connection: Any, _: Callable[[], None]) -> Any:
            await connection.send_packed_command([_ASK_FOR_SLOTS])
            return single(await _aread(connection))

        async with nodes.asking:
            place = _known(nodes.slots, key)
            problem: Exception = ConnectionLost(_nobody_has(key, self._address), sent=False)
            for asked in _in_turn(nodes.slots) if place is None else ():
                try:
                    reply = await self._with_connection(nodes.pool(asked), 0, ask)
                except (ConnectionLost, Refusal) as error:
                    problem = _not_told(error, self._address)
                    continue
                await nodes.drop(nodes.slots.learn(reply, asked))
                place = _known(nodes.slots, key)
                if place is not None:
                    break
            if place is None:
                raise problem
            return place

    def _connected(self) -> Any:
        if self._client is None:
            self._client = async_client(self._address, self._options, self._settings)
        return self._client

    async def _look_again(self) -> None:
        if self._address.kind == "cluster":
            self._connected().slots.forget()
        else:
            await self._connected().connection_pool.disconnect(inuse_connections=False)


def _known(slots: SlotMap, key: str | None) -> Place | None:
    """Who has the key; without one any node that has slots will do."""
    if key is not None:
        return slots.owner(slot_of(key))
    primaries = slots.primaries()
    return random.choice(primaries) if primaries else None


def _in_turn(slots: SlotMap) -> list[Place]:
    """Nodes to ask, in an order of our own, so that a fleet does not ask one and the same."""
    first, last = slots.to_ask()
    return [*random.sample(first, len(first)), *random.sample(last, len(last))]


def _doubt(pool: Any) -> None:
    if isinstance(getattr(pool, "slots", None), SlotMap):
        pool.slots.doubt(pool.place)


def _nobody_has(key: str | None, address: Address) -> str:
    what = "any slot" if key is None else f"the slot {slot_of(key)}"
    return f"{address.shown} cannot be reached: no node of the cluster has {what}"


def _not_told(error: ConnectionLost | Refusal, address: Address) -> Exception:
    """Why a node did not say who has which slot: for now, or for good."""
    if isinstance(error, ConnectionLost):
        return error
    return connection_lost(error, address, sent=False) if error.code in PASSING else typed(error, address)


def _pause_s(pause: Pause, options: ConnectionOptions) -> float:
    return pause.ms / 1000 if pause.attempt is None else backoff_s(pause.attempt, options)


def _read(connection: Any) -> Any:
    try:
        return connection.read_response(disable_decoding=True)
    except rx.ResponseError as error:
        return refusal_of(error)
    except rx.ConnectionError as error:
        raise reply_in(error) from None


def _read_bytes(connection: Any, packed: list[bytes], most: int) -> Any:
    """Send one command and give the bytes of its reply. Behind it goes a PING with a word that nobody can know: its
    echo is the end, whatever a reply holds. An error reply comes as ever. Of a reply that is too long the rest is not
    waited for: without the connection the server lets go of it.
    """
    word = secrets.token_hex(16)
    end = f"${len(word)}\r\n{word}\r\n".encode()
    connection.send_packed_command([*packed, hiredis.pack_command(("PING", word))])  # type: ignore[arg-type]
    receive = connection.feed_socket.recv
    data = bytearray()
    while not data.endswith(end):
        some = receive(1 << 18)
        if not some:
            raise ConnectionResetError("closed by the server")
        data += some
        if data.startswith(b"-"):
            return _refusal_in(data, receive)
        if len(data) > most + len(end):
            connection.disconnect()
            return TooLong(len(data))
    return bytes(memoryview(data)[: -len(end)])


def _refusal_in(data: bytearray, receive: Callable[[int], bytes]) -> Refusal:
    """The error that these bytes begin with; what answers the PING is read as well, so that nothing is left."""
    reader = _parser()
    reader.feed(bytes(data))
    found: list[Any] = []
    while len(found) < 2:
        reply = reader.gets()
        if reply is not _MORE:
            found.append(reply)
            continue
        some = receive(1 << 16)
        if not some:
            raise ConnectionResetError("closed by the server")
        reader.feed(some)
    refusal: Refusal = found[0]
    return refusal


def _parser() -> Any:
    """As that of redis-py: what is no reply at all is an error of its kind."""
    return hiredis.Reader(
        protocolError=rx.InvalidResponse,
        replyError=lambda text: refusal_of(rx.ResponseError(text)),
        notEnoughData=_MORE,
    )


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
    """Bytes as they come -> replies, None for those that are no refusals; True when one is.

    Nobody asks what an accepted XADD answered, so that ids of entries are only counted.
    """
    parser = _parser()
    gets = parser.gets

    def take(data: bytes, replies: list[Refusal | None]) -> bool:
        if not data:
            raise ConnectionResetError("closed by the server")
        count = 0 if parser.has_data() else _ids_in(data)
        if count:
            replies += [None] * count
            return False
        parser.feed(data)
        found = [reply if type(reply) is Refusal else None for reply in iter(gets, _MORE)]
        replies += found
        return found.count(None) != len(found)

    return take


def _ids_in(data: bytes) -> int:
    """How many replies these bytes are, when they are ids of entries and nothing else, each to its end; 0 otherwise.

    Such a reply is ``$15``, a line's end, ``1794978620538-0``, a line's end. Neither a dollar nor a line's end can be
    in an id, and every other kind of reply starts a line with a sign that no id has there.
    """
    last = data.rfind(b"$")
    if data[:1] != b"$" or not data.endswith(b"\r\n") or data.find(b"\n", last) == len(data) - 1:
        return 0
    if b"\n-" in data or b":" in data or b"+" in data or b"*" in data:
        return 0
    return data.count(b"$")


async def _aread(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except rx.ResponseError as error:
        return refusal_of(error)
    except rx.ConnectionError as error:
        raise reply_in(error) from None
