"""The promoter: moves delayed jobs to the stream when they are due. One of all that run does it at a time."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from chasqui.errors import ChasquiError
from chasqui.leader import lead
from chasqui.metrics import PromoterTick
from chasqui.options import PromoterOptions, build
from chasqui.protocol import events
from chasqui.protocol.keys import Keys
from chasqui.protocol.lease import Lease
from chasqui.protocol.produce import Room
from chasqui.protocol.promote import Promotion, forget_index, promote_due
from chasqui.redis_io import AsyncLink
from chasqui.runner import Runner
from chasqui.sinks import Guarded, MetricsSink, NoopSink

log = logging.getLogger("chasqui.promoter")


class Promoter(Runner):
    """A promoter in a process of its own. A Consumer has one inside unless told otherwise."""

    def __init__(
        self, url: str | None = None, *, queue: str = "default", metrics: MetricsSink | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.options = build(PromoterOptions, {"url": url, "queue": queue, **options})
        self._keys = Keys(self.options.queue)
        self._metrics = Guarded(metrics or NoopSink())

    async def run(self) -> None:
        """Promote until ``stop``."""
        stop = self._starting()
        link = AsyncLink(self.options)
        try:
            await promote(link, self._keys, self.options, stop=stop, metrics=self._metrics)
        finally:
            await link.close()


async def promote(
    link: AsyncLink, keys: Keys, options: PromoterOptions, *, stop: asyncio.Event, metrics: MetricsSink
) -> None:
    """The promoter's loop, on a link that may be shared."""
    lease = Lease(keys.promoter_lock, options.holder_id or f"p-{uuid.uuid4()}", options.lock_ttl_secs * 1000)
    room = Room.of(options.max_stream_len, options.overflow, 0)

    after: asyncio.Task[None] | None = None

    async def pass_once() -> bool | None:
        nonlocal after
        done = await link.run(
            promote_due(
                keys,
                lease,
                room,
                options.promote_batch,
                options.dlq_max_stream_len,
                all_ids=options.events_enabled,
            )
        )
        if after is not None:
            await after
            after = None
        if done is None:
            return None
        metrics.promoter_tick(PromoterTick(done.moved, done.left, done.lag_ms))
        if done.ids:
            # Beside the next pass, not before it: nothing of it changes what is promoted.
            after = asyncio.create_task(_afterwards(link, keys, done, options))
        # Looping at once while held back at the cap would only spin.
        return done.handled > 0 and done.lag_ms > 0

    try:
        await lead(
            link,
            lease,
            "promoter",
            pass_once,
            interval_ms=options.poll_interval_ms,
            stop=stop,
            on_change=metrics.promoter_lock_outcome,
        )
    finally:
        if after is not None:
            await asyncio.wait([after], timeout=1)


async def _afterwards(link: AsyncLink, keys: Keys, done: Promotion, options: PromoterOptions) -> None:
    """Best effort: the index entries go, and each job has its ``waiting`` event, without a name as in ChasquiMQ."""
    try:
        await link.run(forget_index(keys, done.ids))
        if options.events_enabled:
            now_ms = time.time_ns() // 1_000_000
            waiting = [events.encode("waiting", job_id, now_ms, "") for job_id in done.ids]
            await link.run(events.write(keys, waiting, options.events_max_stream_len))
    except ChasquiError as error:
        log.info("after promoting %d jobs: %s", done.moved, error.message)
