"""Settling: outcomes of jobs, collected and written in batches, one round trip each.

While one batch is on its way the next one gathers, so the busier a worker is, the larger its batches. A batch whose
reply is lost is sent again: every transition is gated on the entry being pending, so it happens once. A server that is
away is waited for; the jobs stay claimed meanwhile, or are taken over by others, and then the gate drops our outcome.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from chasqui.errors import ChasquiError
from chasqui.handlers import describe, is_unrecoverable
from chasqui.intake import ActiveJob
from chasqui.metrics import DlqRouted, RetryScheduled
from chasqui.options import ConsumerOptions
from chasqui.protocol import events
from chasqui.protocol.codec import encode_envelope
from chasqui.protocol.consume import Call, DeadLetter, Member
from chasqui.protocol.flow import Refusal, call_scripts
from chasqui.protocol.replies import number
from chasqui.redis_io import AsyncLink
from chasqui.sinks import MetricsSink
from chasqui.verdicts import GiveUp, Rules, after_failure, asked_ms, next_run

log = logging.getLogger("chasqui.settler")

_EVENTS_CROWD, _EVENTS_KEPT = 5_000, 50_000
_BATCH_BYTES = 1 << 20


class Settler:
    """Takes outcomes as they come; ``settle_loop`` and ``event_loop`` write them."""

    def __init__(
        self,
        link: AsyncLink,
        member: Member,
        options: ConsumerOptions,
        metrics: MetricsSink,
        on_settled: Callable[[list[bytes]], None],
    ) -> None:
        self._link, self._member, self._options, self._metrics = link, member, options, metrics
        self._on_settled = on_settled
        self._rules = Rules.of(options)
        self._done: list[bytes] = []
        self._results: list[tuple[bytes, str, bytes]] = []
        self._retries: list[tuple[ActiveJob, int]] = []
        self._dead: list[DeadLetter] = []
        self._events: list[events.Line] = []
        self._work = asyncio.Event()
        self._news = asyncio.Event()
        self._dropped = 0
        self._unsettled = 0
        self._writing = asyncio.Lock()
        self._insisting: set[asyncio.Task[None]] = set()

    @property
    def crowded(self) -> bool:
        """Whether so many events wait to be written that no more jobs should be taken for the moment."""
        return len(self._events) > _EVENTS_CROWD

    @property
    def idle(self) -> bool:
        return self._unsettled == 0

    # Outcomes. Called on the event loop, between awaits: plain appends.

    def done(self, job: ActiveJob, result: bytes | None) -> None:
        """The handler returned. Of a result without a byte nothing is stored, as in ChasquiMQ."""
        self._unsettled += 1
        if not result:
            self._done.append(job.entry)
        else:
            self._results.append((job.entry, job.id, result))
        self._work.set()

    def failed(self, job: ActiveJob, error: BaseException) -> None:
        """The handler raised: again later, or never."""
        if job.lost:
            self._on_settled([job.entry])
            return
        verdict = after_failure(
            self._rules,
            job.run,
            job.retry,
            unrecoverable=is_unrecoverable(error),
            asked_ms=_asked_ms(error),
            jitter=random.random(),
        )
        if isinstance(verdict, GiveUp):
            self.dead(self._letter(job, verdict.reason, error))
            return
        self._unsettled += 1
        self._retries.append((job, verdict.wait_ms))
        self._work.set()

    def dead(self, letter: DeadLetter) -> None:
        """The job is given up."""
        self._unsettled += 1
        self._dead.append(letter)
        self._work.set()

    def event(self, name: str, job_id: str, job_name: str, *extras: str | int) -> None:
        """Something happened. Best effort: where too many wait to be written it is dropped, and counted."""
        if not self._options.events_enabled:
            return
        if len(self._events) >= _EVENTS_KEPT:
            self._dropped += 1
            return
        self._events.append(events.encode(name, job_id, time.time_ns() // 1_000_000, job_name, extras))
        self._news.set()

    def run_event(self, name: str, job: ActiveJob, duration_us: int | None = None) -> None:
        """``active`` or ``completed``: as ``event``, but made for being called for every job."""
        if self._options.events_enabled:
            if len(self._events) >= _EVENTS_KEPT:
                self._dropped += 1
                return
            line = events.encode_run(name, job.id, time.time_ns() // 1_000_000, job.name, job.attempt + 1, duration_us)
            self._events.append(line)
            if len(self._events) == 1:
                self._news.set()

    def _letter(self, job: ActiveJob, reason: str, error: BaseException) -> DeadLetter:
        data = encode_envelope(job.envelope)
        return DeadLetter(job.entry, data, job.name_bytes, reason, job.run, job.id, error=describe(error))

    # Writing.

    async def settle_loop(self) -> None:
        """Write outcomes for ever; to be cancelled when ``idle``."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self._options.ack_idle_ms and self._unsettled < self._options.ack_batch:
                # Let the jobs that are finishing now come along; no timer, so an idle worker answers at once.
                await asyncio.sleep(0)
            while self._done or self._results or self._retries or self._dead:
                await self._settle_some()

    async def _settle_some(self) -> None:
        options = self._options
        done, self._done = self._done[: options.ack_batch], self._done[options.ack_batch :]
        results, self._results = _cut(self._results, options.ack_batch, lambda item: len(item[2]))
        retries, self._retries = _cut(self._retries, options.retry_inflight, lambda item: len(item[0].packed))
        dead, self._dead = _cut(self._dead, options.dlq_inflight, lambda letter: len(letter.data))
        calls: list[tuple[Call, Callable[[Any], None]]] = []
        if done:
            calls.append((self._member.acks(done), lambda _: self._ended(done)))
        if results:
            ids = [item[0] for item in results]
            calls.append((self._member.acks_with_results(results, options.result_ttl_secs), lambda _: self._ended(ids)))
        if retries:
            moves = [(job.entry, wait, next_run(job.name, job.envelope)) for job, wait in retries]
            calls.append((self._member.retries(moves), lambda reply: self._retried(retries, reply)))
        if dead:
            call = self._member.dead_letters(dead, options.dlq_max_stream_len)
            calls.append((call, lambda reply: self._buried(dead, reply)))
        await self._write(calls)

    async def _write(self, calls: list[tuple[Call, Callable[[Any], None]]]) -> None:
        """Send until the server has answered. What it refuses is tried again beside the rest."""
        failures = 0
        while True:
            try:
                replies = await self._link.run(call_scripts([call for call, _ in calls], safe=True))
                break
            except ChasquiError as error:
                if failures == 0:
                    log.warning("settling %d jobs: %s; trying again", self._unsettled, error.message)
                await asyncio.sleep(_wait_s(failures))
                failures += 1
        for (call, then), reply in zip(calls, replies, strict=True):
            if isinstance(reply, Refusal):
                log.warning("%s: %s; trying again", call[0].name, reply)
                task = asyncio.create_task(self._insist(call, then))
                self._insisting.add(task)
                task.add_done_callback(self._insisting.discard)
            else:
                then(reply)

    async def _insist(self, call: Call, then: Callable[[Any], None]) -> None:
        failures = 0
        while True:
            await asyncio.sleep(_wait_s(failures))
            failures += 1
            try:
                (reply,) = await self._link.run(call_scripts([call], safe=True))
            except ChasquiError:
                continue
            if not isinstance(reply, Refusal):
                then(reply)
                return

    def close(self) -> None:
        """Give up what is still refused; the jobs stay pending, and others take them over."""
        for task in self._insisting:
            task.cancel()

    def _ended(self, ids: list[bytes]) -> None:
        self._unsettled -= len(ids)
        self._on_settled(ids)

    def _retried(self, retries: list[tuple[ActiveJob, int]], reply: list[Any]) -> None:
        for (job, wait_ms), moved in zip(retries, reply, strict=True):
            if number(moved):
                self.event("retry-scheduled", job.id, job.name, "attempt", job.run + 1, "backoff_ms", wait_ms)
                self._metrics.retry_scheduled(RetryScheduled(job.run + 1, wait_ms, job.name))
        self._ended([job.entry for job, _ in retries])

    def _buried(self, dead: list[DeadLetter], reply: list[Any]) -> None:
        for letter, moved in zip(dead, reply, strict=True):
            if number(moved):
                name = letter.name.decode(errors="replace")
                self.event("dlq", letter.job_id, name, "attempt", letter.attempt, "reason", letter.reason)
                self._metrics.dlq_routed(DlqRouted(letter.reason, letter.attempt, name))
        self._ended([letter.entry_id for letter in dead])

    async def event_loop(self) -> None:
        """Write events for ever, in order; to be cancelled after a last ``flush_events``."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self.flush_events()

    async def flush_events(self) -> None:
        async with self._writing:  # one writer: a last flush at the end must not overtake a batch that is on its way
            await self._flush_events()

    async def _flush_events(self) -> None:
        while self._events:
            batch, self._events = self._events, []
            self._on_settled([])  # the crowd is gone, if there was one
            try:
                await self._link.run(events.write(self._member.keys, batch, self._options.events_max_stream_len))
            except ChasquiError as error:
                self._dropped += len(batch)
                log.warning("%d events were not written (%d so far): %s", len(batch), self._dropped, error.message)
                await asyncio.sleep(0.2)


def _asked_ms(error: BaseException) -> int | None:
    try:
        return asked_ms(error)
    except ValueError as unclear:
        log.warning("%s: the usual back-off applies", unclear)
        return None


def _wait_s(failures: int) -> float:
    return min(1.0, 0.05 * (1 << min(failures, 10)))


def _cut(items: list[Any], most: int, size: Callable[[Any], int]) -> tuple[list[Any], list[Any]]:
    """The first items, at most so many and, unless one is larger, a megabyte; and the rest."""
    total = 0
    for i, item in enumerate(items[:most]):
        total += size(item)
        if total > _BATCH_BYTES and i:
            return items[:i], items[i:]
    return items[:most], items[most:]
