"""Reading a queue's events as they happen, blocking or in asyncio.

    with QueueEvents("redis://127.0.0.1:6379/0", queue="emails") as events:
        ...                       # whatever is started here, its events are seen
        for event in events:
            print(event.name, event.job_id, event.fields)

Nothing is missed from the moment the start is pinned: ``$`` means the end of the stream as it stands then, looked up
once, and not the end at each read, between two of which events would fall through. The first contact with the server
raises what goes wrong, so that a wrong address is noticed; after it every outage is waited out, and reading goes on
where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from chasqui.errors import ConfigError, OptionError, RedisError
from chasqui.job import U64_MAX
from chasqui.options import DAY_MS, RoleOptions, build, option
from chasqui.protocol import events
from chasqui.protocol.events import Event
from chasqui.protocol.flow import Flow
from chasqui.protocol.keys import Keys
from chasqui.redis_io import AsyncLink, Link

log = logging.getLogger("chasqui.events")

_RETRY_S = 0.2
_REMIND_S = 60.0
# A blocking read cannot be woken, and a stop is noticed when it ends: so it is cut into slices.
_SLICE_MS = 250
# How long nothing has to come until we look whether the stream is still the one we read.
_LOOK_MS = 5_000
_REMEMBERED = 10_000


@dataclass(frozen=True, kw_only=True)
class QueueEventsOptions(RoleOptions):
    """Options of QueueEvents."""

    start: str = option(
        "$",
        help="Where to begin: `$` (what happens from now on), `0` (all there is), or the id of the last event known.",
    )
    block_ms: int = option(5_000, min=1, max=DAY_MS, help="How long one read waits for events.")
    # A blocking read lasts up to its slice, and servers end it up to a tenth of a second late.
    socket_timeout_ms: int = option(
        30_000, min=2 * _SLICE_MS, max=DAY_MS, help="How long the server may take to answer a command."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "start", _checked_start(self.start))


class QueueEvents(Iterator[Event], AsyncIterator[Event]):
    """The events of one queue, in order: ``for event in ...`` or ``async for event in ...``, one of the two.

    ``start``: ``$`` (what happens from now on), ``0`` (all there is) or the id of the last event known. An id beyond
    the stream's end is taken for one of an earlier life of the stream, which then is read from its beginning.
    Iterating goes on until ``stop()``; ``last_id`` tells at any time where another reader could go on. One task or
    thread reads, any may stop it.
    """

    def __init__(
        self, url: str | None = None, *, queue: str = "default", start: str = "$", block_ms: int = 5_000, **options: Any
    ) -> None:
        given = {"url": url, "queue": queue, "start": start, "block_ms": block_ms, **options}
        self._options = build(QueueEventsOptions, given)
        self._cursor = _Cursor(Keys(self._options.queue), self._options.start)
        # Waiting out an outage is the loop's business, where a stop ends it. One try remains for the link: it follows
        # a slot that moved to another node.
        impatient = dataclasses.replace(self._options, reconnect_attempts=min(1, self._options.reconnect_attempts))
        self._link = Link(impatient)
        self._slice_ms = min(self._options.block_ms, _SLICE_MS)
        self._reading = threading.Lock()
        self._alink = AsyncLink(impatient)
        self._areading = asyncio.Lock()
        self._stopped = threading.Event()
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def __repr__(self) -> str:
        return f"QueueEvents({self._link.shown!r}, queue={self._options.queue!r}, last_id={self.last_id!r})"

    @property
    def last_id(self) -> str:
        """The id of the last event handed out: as ``start`` of another reader, it continues after it.

        Before the first event the id where reading starts, which is ``$`` until ``resolve()`` or the first read.
        """
        return self._cursor.handed_out

    def stop(self) -> None:
        """End the iteration, from any thread or task. It is final: to go on, make another from ``last_id``."""
        self._stopped.set()
        if self._wake is not None:
            loop, wake = self._wake
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(wake.set)

    # Blocking

    def __enter__(self) -> QueueEvents:
        self.resolve()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> QueueEvents:
        return self

    def __next__(self) -> Event:
        while not self._stopped.is_set():
            event = self._cursor.next()
            if event is not None:
                return event
            self.resolve()
            self._fill(self._slice_ms)
        self.close()
        raise StopIteration

    def resolve(self) -> str:
        """Pin the start: every event after this call is seen. Returns the id. Done by the first read otherwise."""
        if not self._cursor.pinned:
            link = Link(self._options)
            try:
                link.run(self._cursor.pin())
            finally:
                link.close()
        return self._cursor.handed_out

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """The next events, waiting up to ``timeout`` seconds for the first; empty when there are none, or when stopped.

        An outage is waited out for that time, and raised when it lasts longer.
        """
        deadline = time.monotonic() + _checked_timeout(timeout)
        self.resolve()
        while not self._stopped.is_set():
            found = self._cursor.rest()
            if found:
                return found
            left_s = deadline - time.monotonic()
            error = self._fill(min(self._slice_ms, int(left_s * 1000)), pause_s=min(_RETRY_S, max(0.0, left_s)))
            if left_s <= 0:
                if error is not None:
                    raise error
                return self._cursor.rest()
        self.close()
        return []

    def close(self) -> None:
        """Stop, and close the connections of blocking reads. One that another thread waits in closes them itself."""
        self.stop()
        if self._reading.acquire(blocking=False):
            try:
                self._link.close()
            finally:
                self._reading.release()

    def _fill(self, block_ms: int, pause_s: float = _RETRY_S) -> RedisError | None:
        try:
            with self._reading:
                self._link.run(self._cursor.read(block_ms))
        except RedisError as error:
            self._cursor.failed(error)
            self._stopped.wait(pause_s)
            return error
        return None

    # asyncio

    async def __aenter__(self) -> QueueEvents:
        await self.aresolve()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> QueueEvents:
        return self

    async def __anext__(self) -> Event:
        while not self._stopped.is_set():
            event = self._cursor.next()
            if event is not None:
                return event
            await self.aresolve()
            await self._afill(self._options.block_ms)
        await self.aclose()
        raise StopAsyncIteration

    async def aresolve(self) -> str:
        """``resolve()``, awaited."""
        if not self._cursor.pinned:
            link = AsyncLink(self._options)
            try:
                await link.run(self._cursor.pin())
            finally:
                await link.close()
        return self._cursor.handed_out

    async def apoll(self, timeout: float = 0.0) -> list[Event]:
        """``poll()``, awaited."""
        deadline = time.monotonic() + _checked_timeout(timeout)
        await self.aresolve()
        while not self._stopped.is_set():
            found = self._cursor.rest()
            if found:
                return found
            left_s = deadline - time.monotonic()
            block_ms = min(self._options.block_ms, int(left_s * 1000))
            error = await self._afill(block_ms, pause_s=min(_RETRY_S, max(0.0, left_s)))
            if left_s <= 0:
                if error is not None:
                    raise error
                return self._cursor.rest()
        await self.aclose()
        return []

    async def aclose(self) -> None:
        """Stop, and close the connections of asyncio."""
        self.stop()
        async with self._areading:
            await self._alink.close()

    async def _afill(self, block_ms: int, pause_s: float = _RETRY_S) -> RedisError | None:
        wake = self._waker()
        if self._stopped.is_set():
            return None
        try:
            async with self._areading:
                await _unless(wake, self._alink.run(self._cursor.read(block_ms)))
        except RedisError as error:
            self._cursor.failed(error)
            await _unless(wake, asyncio.sleep(pause_s))
            return error
        return None

    def _waker(self) -> asyncio.Event:
        """Set by ``stop()``. To be had before looking whether it was called, else a call in between wakes nobody."""
        loop = asyncio.get_running_loop()
        if self._wake is None or self._wake[0] is not loop:
            self._wake = loop, asyncio.Event()
        return self._wake[1]


class _Cursor:
    """Where a reader stands, without the waiting: flows that read on, and what has come, handed out one by one."""

    def __init__(self, keys: Keys, start: str) -> None:
        self.pinned = False
        self.handed_out = start
        self._keys = keys
        self._position = start
        self._ready: deque[Event] = deque()
        self._seen: deque[str] = deque(maxlen=_REMEMBERED)
        self._idle_ms = 0
        self._failing_since: float | None = None
        self._warned_at = 0.0

    def next(self) -> Event | None:
        if not self._ready:
            return None
        event = self._ready.popleft()
        self.handed_out = event.entry_id
        return event

    def rest(self) -> list[Event]:
        found = list(self._ready)
        self._ready.clear()
        if found:
            self.handed_out = found[-1].entry_id
        return found

    def pin(self) -> Flow[None]:
        tail = yield from events.last_id(self._keys)
        if self._position == "$":
            self._go_to(tail)
        else:
            self._follow(tail)
        self.pinned = True

    def read(self, block_ms: int) -> Flow[None]:
        if self._failing_since is not None or self._idle_ms >= _LOOK_MS:
            # Servers come back with less than they had, and streams are deleted; XREAD alone would wait for ever.
            self._follow((yield from events.last_id(self._keys)))
            self._idle_ms = 0
        found = yield from events.read(self._keys, self._position, block_ms)
        if self._failing_since is not None:
            log.info("%s can be read again, after %.1f s", self._keys.events, time.monotonic() - self._failing_since)
            self._failing_since = None
        if found:
            self._position = found[-1].entry_id
            self._ready.extend(found)
            self._seen.extend(event.entry_id for event in found)
            self._idle_ms = 0
        else:
            self._idle_ms += max(1, block_ms)

    def failed(self, error: RedisError) -> None:
        now = time.monotonic()
        if self._failing_since is None or now - self._warned_at >= _REMIND_S:
            log.warning("%s cannot be read: %s; trying again until it can", self._keys.events, error.message)
            self._warned_at = now
        if self._failing_since is None:
            self._failing_since = now

    def _follow(self, tail: str) -> None:
        position = events.resume_from(self._position, tail, self._seen)
        if position != self._position:
            log.warning(
                "%s ends at %s, before %s, where reading was: it lost its end or was made anew; going on after %s",
                self._keys.events,
                tail,
                self._position,
                position,
            )
            self._go_to(position)

    def _go_to(self, position: str) -> None:
        self._position = position
        self._seen.clear()
        self._seen.append(position)
        if not self._ready:
            self.handed_out = position


async def _unless(wake: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or drop it when woken."""
    working, waking = asyncio.ensure_future(work), asyncio.ensure_future(wake.wait())
    try:
        await asyncio.wait({working, waking}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        waking.cancel()
        await asyncio.gather(working, waking, return_exceptions=True)


def _checked_start(start: str) -> str:
    if start == "$":
        return start
    match = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", start, re.ASCII)
    parts = [int(part or 0) for part in match.groups()] if match else [U64_MAX + 1]
    if max(parts) > U64_MAX:
        raise OptionError(f"start expects $, 0 or an entry id such as 1794978715257-0, got {start!r:.80}")
    return f"{parts[0]}-{parts[1]}"


def _checked_timeout(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ConfigError(f"timeout expects seconds, zero or more; got {timeout!r:.80}")
    return float(timeout)
