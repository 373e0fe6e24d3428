"""The consumer: reads jobs, runs handlers, settles outcomes, and keeps its claims alive meanwhile.

Delivery is at-least-once; while nobody crashes, once. Killed at any point: what was claimed goes stale and is taken
over by another worker after ``claim_min_idle_ms``; what was settled stays settled. Server gone: everything waits and
goes on by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from chasqui.errors import (
    AuthFailed,
    ChasquiError,
    ConfigError,
    ConnectionLost,
    DecodeError,
    ServerError,
    UnrecoverableError,
)
from chasqui.handlers import BatchHandler, Handler, Router, brief, is_async, outcomes, reason_of
from chasqui.intake import ActiveJob, Limits, classify, on_last_run
from chasqui.metrics import JobOutcome, ReaderBatch
from chasqui.options import ConsumerOptions, PromoterOptions, SchedulerOptions, build
from chasqui.payload import PayloadCodec
from chasqui.promoter import promote
from chasqui.protocol.consume import FORGET_IDLE_MS, DeadLetter, Entry, Member
from chasqui.protocol.flow import Command, Flow
from chasqui.protocol.keys import Keys
from chasqui.protocol.manifests import CONSUMER_PREFIX
from chasqui.redis_io import AsyncLink
from chasqui.runner import Runner
from chasqui.scheduler import schedule
from chasqui.settler import Settler
from chasqui.sinks import Guarded, MetricsSink, NoopSink
from chasqui.threads import Threads

log = logging.getLogger("chasqui.consumer")

_FORGET_EVERY_S = 3600.0
_CLAIM_EVERY_S = 1.0
_LONGEST_WAIT_S = 1.0
_TRIAL_POLL_S = 0.02


class Consumer(Runner):
    """A worker of one queue.

    >>> Consumer("redis://127.0.0.1:6379/0", queue="emails").run_sync(send_email)

    Handlers get a job and return its result, or raise: ``UnrecoverableError`` gives the job up, ``RetryLater`` chooses
    its own wait, anything else is retried by the job's or the queue's rules. Coroutines run on the event loop, plain
    functions in threads.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str = "default",
        group: str = "default",
        metrics: MetricsSink | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = build(ConsumerOptions, {"url": url, "queue": queue, "group": group, **options})
        if not self.options.group:
            raise ConfigError("group expects a name, got an empty one")
        if self.options.consumer_id.startswith(CONSUMER_PREFIX):
            raise ConfigError(
                f"consumer_id expects a name that does not start with {CONSUMER_PREFIX}, which are Spark's, "
                f"got {self.options.consumer_id!r:.80}"
            )
        self.consumer_id = self.options.consumer_id or f"c-{uuid.uuid4()}"
        self._member = Member(Keys(self.options.queue), self.options.group, self.consumer_id)
        self._metrics = Guarded(metrics or NoopSink())
        self._measured = metrics is not None
        self._last_read = 0.0
        self._full = False

    @property
    def healthy(self) -> bool:
        """Whether it takes jobs: its last successful read is not older than three block intervals.

        With its hands full it does not read; then renewing its claims, three times per threshold, shows that it can.
        """
        every_ms = max(self.options.block_ms, self.options.claim_min_idle_ms / 3 if self._full else 0)
        return self._last_read > 0 and time.monotonic() - self._last_read < 3 * every_ms / 1000

    async def run(self, handler: Handler | Router | BatchHandler) -> None:
        """Work until ``stop``; then finish running jobs within ``shutdown_deadline_secs`` and give the others back."""
        if not isinstance(handler, Router | BatchHandler) and not callable(handler):
            raise ConfigError(f"handler expects a function, a Router or a batch handler, got {type(handler).__name__}")
        stop = self._starting()
        link = AsyncLink(self.options)
        try:
            await _Session(self, link, handler, stop).work()
        finally:
            self._last_read = 0.0
            await link.close()


class _Session:
    """One run of a consumer: its tasks, and the jobs it holds."""

    def __init__(
        self, consumer: Consumer, link: AsyncLink, handler: Handler | Router | BatchHandler, stop: asyncio.Event
    ) -> None:
        self._consumer, self._link, self._handler, self._stop = consumer, link, handler, stop
        self._options = consumer.options
        self._member = consumer._member
        self._metrics = consumer._metrics
        self._codec = PayloadCodec(raw=self._options.raw, datetimes=self._options.datetimes)
        self._limits = Limits(self._options.max_attempts, self._options.max_payload_bytes)
        self._settler = Settler(link, self._member, self._options, self._metrics, self._settled)
        self._held: dict[bytes, ActiveJob | DeadLetter] = {}
        self._unseen: dict[bytes, int] = {}
        self._known: set[bytes] = set()
        self._claim_start = 0
        self._trial: ActiveJob | None = None
        self._tried_since = 0.0
        self._ready: deque[ActiveJob] = deque()
        self._sleepers: deque[asyncio.Future[None]] = deque()
        self._waking = False
        self._running = 0
        self._room = asyncio.Event()
        # Read again when so few wait for a slot; and hold no more than this, finished but unsettled ones included.
        at_once = handler.max_jobs if isinstance(handler, BatchHandler) else 1
        self._few = 2 * max(self._options.concurrency, at_once)
        self._most = self._few + 8 * self._options.batch
        self._loop = asyncio.get_running_loop()
        self._threads: Threads | None = None
        self._busy = False
        self._renewed = time.monotonic()

    async def work(self) -> None:
        await self._join()
        await self._look_for_a_twin()
        background = [self._spawn(self._settler.settle_loop()), self._spawn(self._settler.event_loop())]
        background += [self._spawn(self._renew_loop()), self._spawn(self._forget_loop())]
        roles = self._roles()
        if isinstance(self._handler, BatchHandler):
            count = max(1, self._options.concurrency // self._handler.max_jobs)
            workers = [self._spawn(self._work_in_batches(self._handler)) for _ in range(count)]
        else:
            workers = [self._spawn(self._work_singly()) for _ in range(self._options.concurrency)]
        reader = self._spawn(self._read_loop())
        try:
            await self._until_stop([reader, *background, *workers, *roles])
            await self._shut_down(reader, roles, workers)
        finally:
            self._settler.close()
            for task in [reader, *workers, *roles, *background]:
                task.cancel()
            # A handler may cling to its job when cancelled; it must not cling to us.
            await asyncio.wait([reader, *workers, *roles, *background], timeout=0.5)
            if self._threads is not None:
                self._threads.close()

    # Start and end.

    async def _join(self) -> None:
        """Enter the group; a server that is not there yet is waited for, one that refuses us is an error."""
        failures = 0
        while not self._stop.is_set():
            try:
                return await self._link.run(self._member.ensure_group())
            except ConnectionLost as error:
                log.warning("%s; waiting for it", error.message)
                await self._pause(failures)
                failures += 1
        return None

    async def _look_for_a_twin(self) -> None:
        """Of a name that was made there is one; a chosen one may be in a file that many workers read."""
        if not self._options.consumer_id or self._stop.is_set():
            return
        try:
            idle_ms = await self._link.run(self._member.idle_ms())
        except ChasquiError as error:
            log.info("looking for workers of the same name: %s", error.message)
            return
        if idle_ms is not None and idle_ms < 2 * self._options.block_ms:
            log.warning(
                "a worker with consumer_id=%s was at work %d ms ago: if it is still there, each gives back jobs of "
                "the other, which run twice then; give each a name of its own, or none to have one made",
                self._options.consumer_id,
                idle_ms,
            )

    def _roles(self) -> list[asyncio.Task[None]]:
        options, keys = self._options, self._member.keys
        roles = []
        if options.delayed_enabled:
            promoter = PromoterOptions(
                queue=options.queue,
                poll_interval_ms=options.delayed_poll_interval_ms,
                promote_batch=options.delayed_promote_batch,
                max_stream_len=options.delayed_max_stream_len,
                lock_ttl_secs=options.delayed_lock_ttl_secs,
                holder_id=self._consumer.consumer_id,
                events_enabled=options.events_enabled,
                events_max_stream_len=options.events_max_stream_len,
                dlq_max_stream_len=options.dlq_max_stream_len,
            )
            roles.append(self._spawn(promote(self._link, keys, promoter, stop=self._stop, metrics=self._metrics)))
        if options.run_scheduler:
            scheduler = SchedulerOptions(
                queue=options.queue,
                tick_interval_ms=options.scheduler_tick_interval_ms,
                max_stream_len=options.delayed_max_stream_len,
                dlq_max_stream_len=options.dlq_max_stream_len,
            )
            on_change = self._metrics.promoter_lock_outcome
            roles.append(self._spawn(schedule(self._link, keys, scheduler, stop=self._stop, on_change=on_change)))
        return roles

    async def _until_stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for the stop, or for a task that should not end to end: that is a defect, and must be seen."""
        stopped = self._spawn(self._stop.wait())
        try:
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                for task in tasks:
                    if task.done() and task.exception() is not None:
                        await task
        finally:
            stopped.cancel()

    async def _shut_down(
        self, reader: asyncio.Task[None], roles: list[asyncio.Task[None]], workers: list[asyncio.Task[None]]
    ) -> None:
        """Nothing lost: unstarted jobs are given back, running ones may finish, and what is finished is settled."""
        deadline = time.monotonic() + self._options.shutdown_deadline_secs
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        unstarted = [(job.entry, job.deliveries) for job in self._ready]
        self._ready.clear()
        await self._give_back(unstarted, deadline)
        await self._quiet(deadline)
        if self._running:
            log.warning("%d handlers did not end in time; others take their jobs over", self._running)
            for task in workers:
                task.cancel()
            await asyncio.wait(workers, timeout=0.5)
        if roles:
            await asyncio.wait(roles, timeout=1)
        try:
            async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                await self._settler.flush_events()
                # Our name may go if nothing is pending under it. If this is not reached it is forgotten in a day.
                await self._link.run(self._member.leave())
        except (ChasquiError, TimeoutError) as error:
            log.info("leaving the group: %s", error)

    async def _quiet(self, deadline: float) -> None:
        """Until every started job has ended and is settled, or the time is up."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while self._running or not self._settler.idle:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            pass

    async def _give_back(self, entries: list[tuple[bytes, int]], deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.5, deadline - time.monotonic())):
                await self._link.run(self._member.release(self._options.claim_min_idle_ms, entries))
                # A read that the stop cut off may have taken jobs that we never saw. Twice, because only after a round
                # trip is it sure that the server knows that nobody reads there any more.
                await self._recover()
                await self._recover()
        except (ChasquiError, TimeoutError) as error:
            log.warning("%d jobs could not be given back (%s); others take them over", len(entries), error)
        for entry_id, _ in entries:
            self._held.pop(entry_id, None)

    # Reading.

    async def _read_loop(self) -> None:
        failures = 0
        next_claim = 0.0
        lost_reply = no_group = False
        while True:
            try:
                if no_group:
                    self._known = set(self._held)
                    await self._join()
                    no_group = False
                if await self._paused():
                    self._consumer._last_read = time.monotonic()
                    await asyncio.sleep(self._options.pause_poll_ms / 1000)
                    continue
                await self._wait_for_room()
                count = self._options.batch
                if lost_reply:
                    await self._recover()
                    lost_reply, next_claim = False, 0.0
                now = time.monotonic()
                if now >= next_claim:
                    entries, next_claim = await self._claim(count, now)
                    if entries:
                        self._take(entries)
                        continue
                block_ms = max(1, min(self._options.block_ms, int((next_claim - now) * 1000)))
                entries = await self._link.run(self._member.read(count, block_ms))
                self._consumer._last_read = time.monotonic()
                failures = 0
                if entries:
                    self._take(entries)
                elif self._busy:
                    self._busy = False
                    self._settler.event("drained", "", "")
            except ConnectionLost as error:
                lost_reply = True
                if failures == 0:
                    log.warning("%s; waiting for it", error.message)
                await self._pause(failures)
                failures += 1
            except AuthFailed:
                raise
            except ChasquiError as error:
                if isinstance(error, ServerError) and "NOGROUP" in error.message:
                    log.warning("stream or group of queue %r is gone: made again", self._options.queue)
                    no_group = True
                else:
                    log.warning("reading: %s; trying again", error.message)
                    await self._pause(failures)
                    failures += 1

    async def _paused(self) -> bool:
        now = time.monotonic()
        if now - self._pause_checked >= self._options.pause_poll_ms / 1000:
            self._pause_checked = now
            self._is_paused = bool(await self._link.run(_exists(self._member.keys.paused)))
        return self._is_paused

    _pause_checked = 0.0
    _is_paused = False

    async def _wait_for_room(self) -> None:
        while len(self._ready) >= self._few or len(self._held) >= self._most or self._settler.crowded:
            self._consumer._full = True
            self._room.clear()
            await self._room.wait()
        self._consumer._full = False

    async def _claim(self, count: int, now: float) -> tuple[list[Entry], float]:
        """Jobs of workers that fell silent, and when to look again.

        Of those that one more dead worker would end, one at a time is tried; the others go back before it is started.
        So a job that kills its worker takes no other with it.
        """
        if self._trying(now):
            return [], now + _TRIAL_POLL_S
        if now - self._renewed > self._options.claim_min_idle_ms / 2000:
            await self._renew()  # the loop was held up: else our own jobs would look stale to us
        entries, wait_ms, self._claim_start = await self._link.run(
            self._member.claim_stale(self._options.claim_min_idle_ms, count, self._claim_start)
        )
        every = min(_CLAIM_EVERY_S, self._options.claim_min_idle_ms / 3000)
        wait_s = every if wait_ms < 0 else min(every, wait_ms / 1000)
        fresh = [entry for entry in entries if entry[0] not in self._held]
        suspects = [entry for entry in fresh if self._suspicious(entry)]
        if suspects:
            spare = {entry_id: deliveries for entry_id, _, deliveries in suspects[1:]}
            self._unseen |= spare
            await self._link.run(self._member.release(self._options.claim_min_idle_ms, list(spare.items())))
            return [entry for entry in fresh if entry[0] not in spare], now + _TRIAL_POLL_S
        return fresh, 0.0 if len(entries) == count else now + wait_s

    def _suspicious(self, entry: Entry) -> bool:
        found = classify(entry, self._limits, self)
        return isinstance(found, ActiveJob) and on_last_run(found, self._limits)

    def _trying(self, now: float) -> bool:
        """Whether a job on its last run is here. One that has run for a while did not kill us: the next may come."""
        job = self._trial
        if job is None or job.entry not in self._held:
            return False
        if any(one is job for one in self._ready):
            self._tried_since = now  # it still waits for a slot
        return now - self._tried_since < self._options.claim_min_idle_ms / 1000

    async def _recover(self) -> None:
        """After a lost reply: jobs that were given to us without our knowing are given back, as if never delivered.

        How often it was delivered before is noted the first time: however often this is cut off and done again, one
        delivery is forgiven, and no start of a worker that died.
        """
        for entry_id, deliveries in await self._link.run(self._member.pending()):
            if entry_id not in self._held:
                self._unseen.setdefault(entry_id, max(0, deliveries - 1))
        await self._link.run(self._member.release(self._options.claim_min_idle_ms, list(self._unseen.items())))

    def _take(self, entries: list[Entry]) -> None:
        self._busy = True
        held, ready, limits = self._held, self._ready, self._limits
        reclaimed = 0
        for entry in entries:
            if entry[0] in held or (not entry[2] and entry[0] in self._known):
                continue  # a group that was made again hands out what we have, or had, already
            self._unseen.pop(entry[0], None)
            found = classify(entry, limits, self)
            held[entry[0]] = found
            reclaimed += entry[2] > 0
            if isinstance(found, DeadLetter):
                self._settler.dead(found)
            else:
                ready.append(found)
                if entry[2] and on_last_run(found, limits):
                    self._trial, self._tried_since = found, time.monotonic()
        self._metrics.reader_batch(ReaderBatch(len(entries), reclaimed))
        self._wake()

    def _settled(self, ids: list[bytes]) -> None:
        for entry_id in ids:
            self._held.pop(entry_id, None)
        self._room.set()

    # Running handlers. A worker that finds more jobs wakes the next one before it starts its own, so handlers that
    # never wait are run by one worker in a row, and handlers that do wait have all workers.

    def _wake(self) -> None:
        if self._ready and self._sleepers and not self._waking:
            sleeper = self._sleepers.popleft()
            if not sleeper.done():
                self._waking = True
                sleeper.set_result(None)

    async def _next(self) -> ActiveJob:
        while not self._ready:
            sleeper = self._loop.create_future()
            self._sleepers.append(sleeper)
            await sleeper
            self._waking = False
        job = self._ready.popleft()
        if self._ready:
            self._wake()
        if len(self._ready) == self._few - 1:
            # The next read goes out now, not after a burst of handlers that never wait.
            self._room.set()
            await asyncio.sleep(0)
        return job

    async def _work_singly(self) -> None:
        if isinstance(self._handler, Router):
            table = {name: self._callable(handler) for name, handler in self._handler.handlers.items()}
            default = self._callable(self._handler.default) if self._handler.default is not None else None
        else:
            table, default = {}, self._callable(self._handler)  # type: ignore[arg-type]
        settler, codec, store = self._settler, self._codec, self._options.store_results
        clock, unpack, ready, few = time.perf_counter_ns, codec.unpack, self._ready, self._few
        task = asyncio.current_task()
        while True:
            if len(ready) > few:  # the common case of _next, without the cost of awaiting it
                job = ready.popleft()
                self._wake()
            else:
                job = await self._next()
            self._running += 1
            try:
                settler.run_event("active", job)
                start = clock()
                try:
                    call = table.get(job.name, default)
                    if call is None:
                        raise self._unknown(job.name)
                    job.payload = unpack(job.packed)
                    returned = await call(job)
                    result = codec.pack(returned) if store and returned is not None else None
                except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
                    _raise_if_ours(error, task)
                    self._failed(job, error, (clock() - start) // 1000)
                else:
                    self._succeeded(job, result, (clock() - start) // 1000)
            finally:
                self._running -= 1

    async def _work_in_batches(self, handler: BatchHandler) -> None:
        call = self._callable(handler.function)
        while True:
            jobs = [await self._next()]
            self._running += 1
            try:
                until = self._loop.time() + handler.max_wait_ms / 1000
                while len(jobs) < handler.max_jobs:
                    if self._ready:
                        jobs.append(self._ready.popleft())
                        continue
                    left = until - self._loop.time()
                    if left <= 0 or self._stop.is_set():
                        break
                    await asyncio.sleep(min(left, 0.001))
                await self._run_batch(call, jobs)
            finally:
                self._running -= 1

    async def _run_batch(self, call: Callable[[Any], Awaitable[Any]], jobs: list[ActiveJob]) -> None:
        runnable: list[ActiveJob] = []
        task = asyncio.current_task()
        start = time.perf_counter_ns()
        for job in jobs:
            if job.lost:  # taken over while the batch waited for more
                self._settled([job.entry])
                continue
            self._settler.run_event("active", job)
            try:
                job.payload = self._codec.unpack(job.packed)
                runnable.append(job)
            except DecodeError as error:
                self._finish(job, error, start)
        if not runnable:
            return
        try:
            answers = outcomes(runnable, await call(runnable))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            _raise_if_ours(error, task)
            answers = [error] * len(runnable)
        for job, answer in zip(runnable, answers, strict=True):
            self._finish(job, answer, start)

    def _finish(self, job: ActiveJob, answer: Any, start: int) -> None:
        took = (time.perf_counter_ns() - start) // 1000
        result = None
        if not isinstance(answer, BaseException) and answer is not None and self._options.store_results:
            try:
                result = self._codec.pack(answer)
            except ChasquiError as error:
                answer = error
        if isinstance(answer, BaseException):
            self._failed(job, answer, took)
        else:
            self._succeeded(job, result, took)

    def _succeeded(self, job: ActiveJob, result: bytes | None, took_us: int) -> None:
        if self._consumer._measured:
            self._metrics.job_outcome(JobOutcome("ok", job.run, took_us, job.name))
        self._settler.run_event("completed", job, took_us)
        self._settler.done(job, result)

    def _failed(self, job: ActiveJob, error: BaseException, took_us: int) -> None:
        if self._consumer._measured:
            self._metrics.job_outcome(JobOutcome("err", job.run, took_us, job.name))
        if log.isEnabledFor(logging.INFO):
            log.info("job %s%s failed in run %d: %s", job.id, job.name and f" ({job.name})", job.run, brief(error))
        self._settler.event(
            "failed", job.id, job.name, "attempt", job.run, "reason", reason_of(error), "duration_us", took_us
        )
        self._settler.failed(job, error)

    def _callable(self, handler: Handler) -> Callable[[Any], Awaitable[Any]]:
        if is_async(handler):
            return handler
        if self._threads is None:
            self._threads = Threads(self._options.concurrency, self._loop)
        threads = self._threads

        async def in_thread(job: Any) -> Any:
            returned = await threads.run(handler, job)
            # A coroutine function behind a plain decorator looks plain, until it is called.
            return await returned if inspect.isawaitable(returned) else returned

        return in_thread

    def _unknown(self, name: str) -> Exception:
        text = f"no handler for the name {name!r:.80}"
        return UnrecoverableError(text) if self._options.unknown_name == "dlq" else LookupError(text)

    # Keeping claims.

    def extend(self, job: ActiveJob) -> Any:
        async def renew() -> bool:
            lost = await self._link.run(self._member.renew([job.entry]))
            job.lost = job.lost or bool(lost)
            return not job.lost

        try:
            asyncio.get_running_loop()
            return renew()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(renew(), self._loop).result()

    async def _renew_loop(self) -> None:
        """Renew all we hold at a third of the threshold: jobs that run, wait for a slot, or wait to be settled."""
        every = self._options.claim_min_idle_ms / 3000
        while True:
            await asyncio.sleep(every)
            try:
                await self._renew()
            except ChasquiError as error:
                log.info("renewing claims: %s", error.message)

    async def _renew(self) -> None:
        ids = list(self._held)
        if ids:
            for entry_id in await self._link.run(self._member.renew(ids)):
                held = self._held.get(entry_id)
                if isinstance(held, ActiveJob):
                    held.lost = True
                    if held in self._ready:  # not started: then it need not be
                        self._ready.remove(held)
                        self._settled([entry_id])
            if self._consumer._full:
                self._consumer._last_read = time.monotonic()
        self._renewed = time.monotonic()

    async def _forget_loop(self) -> None:
        while True:
            try:
                gone = await self._link.run(self._member.forget(FORGET_IDLE_MS))
                if gone:
                    log.info("forgot %d workers that were idle for a day", len(gone))
            except ChasquiError as error:
                log.debug("forgetting idle workers: %s", error.message)
            await asyncio.sleep(_FORGET_EVERY_S)

    # Odds and ends.

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work)

    async def _pause(self, failures: int) -> None:
        """Wait before trying again: short at first, never longer than a second, and not past a stop."""
        try:
            async with asyncio.timeout(min(_LONGEST_WAIT_S, 0.05 * 2 ** min(failures, 10))):
                await self._stop.wait()
        except TimeoutError:
            pass


def _raise_if_ours(error: BaseException, task: asyncio.Task[Any] | None) -> None:
    """Only the end of the worker itself is no outcome: its task is cancelled, or thrown away unfinished, which does not
    happen to a task that runs.
    """
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        running = asyncio._get_running_loop() is not None and asyncio.current_task() is task
        if not running or task is None or task.cancelling():
            raise error


def _exists(key: str) -> Flow[int]:
    reply: int = yield Command(("EXISTS", key), safe=True)
    return reply
