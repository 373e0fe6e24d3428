"""Promoter and scheduler inside a program that has no event loop of its own: one thread for any number of queues."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from chasqui.options import ConnectionOptions, PromoterOptions, SchedulerOptions, Settling
from chasqui.promoter import promote
from chasqui.protocol.keys import Keys
from chasqui.redis_io import AsyncLink
from chasqui.scheduler import schedule
from chasqui.sinks import Guarded, NoopSink

log = logging.getLogger("chasqui.standing")

_AGAIN_AFTER_S = 1.0


class Standing:
    """Runs the roles for the queues it is told of, until ``stop`` or the end of the process; their leases then
    lapse.
    """

    def __init__(self, connection: ConnectionOptions, rules: Settling, *, promoter: bool, scheduler: bool) -> None:
        self._connection, self._rules = connection, rules
        self._promoter, self._scheduler = promoter, scheduler
        self._queues: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._link = AsyncLink(connection)
        self._thread = threading.Thread(target=self._run, name="chasqui-standing", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, queue: str) -> None:
        """See to that queue as well."""
        if queue in self._queues or not (self._promoter or self._scheduler):
            return
        self._queues.add(queue)
        if not self._thread.is_alive():
            self._thread.start()
        self._loop.call_soon_threadsafe(self._start, queue)

    def stop(self, within_s: float = 1.0) -> None:
        """End the roles and give their leases back."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(within_s)
        elif self._thread.ident is None:
            self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._until_stop())
        self._loop.close()

    async def _until_stop(self) -> None:
        await self._stop.wait()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        await self._link.close()

    def _start(self, queue: str) -> None:
        for role, wanted in ((self._promote, self._promoter), (self._schedule, self._scheduler)):
            if wanted:
                task = self._loop.create_task(self._keep_up(role, queue))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _keep_up(self, role: Callable[[str], Coroutine[Any, Any, None]], queue: str) -> None:
        """Outages the roles wait out by themselves. Whatever else ends one, delayed jobs must not wait for a restart of
        the whole program.
        """
        while not self._stop.is_set():
            try:
                await role(queue)
                return
            except Exception:
                log.exception("queue %r: promoter or scheduler failed and is started again", queue)
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_AFTER_S):
                    await self._stop.wait()

    async def _promote(self, queue: str) -> None:
        rules = self._rules
        options = PromoterOptions(
            queue=queue,
            events_enabled=rules.events_enabled,
            events_max_stream_len=rules.events_max_stream_len,
            dlq_max_stream_len=rules.dlq_max_stream_len,
        )
        await promote(self._link, Keys(queue), options, stop=self._stop, metrics=Guarded(NoopSink()))

    async def _schedule(self, queue: str) -> None:
        options = SchedulerOptions(queue=queue, dlq_max_stream_len=self._rules.dlq_max_stream_len)
        await schedule(self._link, Keys(queue), options, stop=self._stop, on_change=lambda _: None)
