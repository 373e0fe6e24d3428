"""The scheduler: fires repeatable jobs when they are due. One of all that run does it at a time."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from chasqui.ids import new_ids
from chasqui.leader import lead
from chasqui.metrics import LockOutcome
from chasqui.options import SchedulerOptions, build
from chasqui.protocol.keys import Keys
from chasqui.protocol.lease import Lease
from chasqui.protocol.produce import Room
from chasqui.protocol.schedule import pass_once
from chasqui.redis_io import AsyncLink
from chasqui.runner import Runner

log = logging.getLogger("chasqui.scheduler")


class HearsLocks(Protocol):
    """The part of a metrics sink that a scheduler has something to tell."""

    def promoter_lock_outcome(self, outcome: LockOutcome, /) -> object: ...


class Scheduler(Runner):
    """A scheduler in a process of its own. A Consumer has one inside unless told otherwise.

    Any number may run for a queue: one leads, the others are spares that take over when its lease ends.

    >>> Scheduler("redis://127.0.0.1:6379/0", queue="emails").run_sync()
    """

    def __init__(
        self, url: str | None = None, *, queue: str = "default", metrics: HearsLocks | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.options = build(SchedulerOptions, {"url": url, "queue": queue, **options})
        self._keys = Keys(self.options.queue)
        self._metrics = metrics

    async def run(self) -> None:
        """Fire what is due until ``stop``."""
        stop = self._starting()
        link = AsyncLink(self.options)
        try:
            await schedule(link, self._keys, self.options, stop=stop, on_change=self._tell)
        finally:
            await link.close()

    def _tell(self, outcome: LockOutcome) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.promoter_lock_outcome(outcome)
        except Exception as error:  # noqa: BLE001 - whoever measures must not disturb what is measured
            log.warning("the metrics sink failed: %s: %s", type(error).__name__, error)


async def schedule(
    link: AsyncLink,
    keys: Keys,
    options: SchedulerOptions,
    *,
    stop: asyncio.Event,
    on_change: Callable[[LockOutcome], None],
) -> None:
    """The scheduler's loop, on a link that may be shared."""
    lease = Lease(keys.scheduler_lock, options.holder_id or f"s-{uuid.uuid4()}", options.lock_ttl_secs * 1000)
    room = Room.of(options.max_stream_len, options.overflow, 0)

    async def once() -> bool | None:
        return await link.run(pass_once(keys, lease, room, options.batch, options.dlq_max_stream_len, new_ids))

    await lead(link, lease, "scheduler", once, interval_ms=options.tick_interval_ms, stop=stop, on_change=on_change)
