"""Handlers on executors: rows of claimed jobs in, outcomes out. No I/O but what handlers do themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from chasqui import Backoff, ConfigError, Job, RetryOverride, Router, UnrecoverableError
from chasqui.bridge import (
    FAIL,
    OK,
    RETRY,
    BatchHandler,
    Outcome,
    PayloadCodec,
    asked_ms,
    batch_outcomes,
    describe,
    is_async,
    is_unrecoverable,
    reason_of,
)
from chasqui_spark.collecting import paused, resumed

SETTLE_JOBS = 1000
SETTLE_AFTER_S = 0.5
"""Outcomes are settled when so many are there, or so long after the last time: slow handlers do not hold theirs
back.
"""

Told = list[tuple[str, str, int]]


@dataclass(frozen=True, slots=True)
class ArrowHandler:
    """A handler of Arrow tables; made by ``arrow_batch``."""

    function: Callable[[pa.Table], Any]
    max_jobs: int


def arrow_batch(*, max_jobs: int = 10_000) -> Callable[[Callable[[pa.Table], Any]], ArrowHandler]:
    """Make a function a handler of Arrow tables: the columns of the view ``jobs``, the payload as MessagePack.

    It returns None (all are done), or one outcome per row, in order: the job's result or an exception. Raising fails
    all.
    """
    if isinstance(max_jobs, bool) or not isinstance(max_jobs, int) or max_jobs < 1:
        raise ConfigError(f"max_jobs expects a whole number, at least 1; got {max_jobs!r:.80}")
    return lambda function: ArrowHandler(function, max_jobs)


AnyHandler = Callable[[Any], Any] | Router | BatchHandler | ArrowHandler


@dataclass(frozen=True, slots=True)
class Handling:
    """A handler and how it is called; goes to executors."""

    handler: AnyHandler
    codec: PayloadCodec
    store_results: bool = False
    concurrency: int = 100
    unknown_name: str = "fail"

    def __post_init__(self) -> None:
        if not isinstance(self.handler, Router | BatchHandler | ArrowHandler) and not callable(self.handler):
            raise ConfigError(
                f"handler expects a function, a Router or a batch handler, got {type(self.handler).__name__}"
            )

    def run(self, batch: pa.RecordBatch, active: Callable[[Told], None]) -> Iterator[list[Outcome]]:
        """Run the handler on all rows of one queue; ``active`` is told of jobs just before they start."""
        with paused():
            if isinstance(self.handler, ArrowHandler):
                yield from self._tables(self.handler, batch, active)
            elif isinstance(self.handler, BatchHandler):
                size = self.handler.max_jobs
                for start in range(0, batch.num_rows, size):
                    yield self._lists(self.handler, batch.slice(start, size), active)
            elif self._asynchronous():
                for start in range(0, batch.num_rows, SETTLE_JOBS):
                    with resumed():
                        done = asyncio.run(self._together(batch.slice(start, SETTLE_JOBS), active))
                    yield done
            else:
                yield from self._singly(batch, active)

    def _tables(
        self, handler: ArrowHandler, batch: pa.RecordBatch, active: Callable[[Told], None]
    ) -> Iterator[list[Outcome]]:
        for start in range(0, batch.num_rows, handler.max_jobs):
            part = batch.slice(start, handler.max_jobs)
            refs = self._begun(part, active)
            begin = time.perf_counter_ns()
            try:
                with resumed():
                    returned = handler.function(pa.Table.from_batches([part]))
                if isinstance(returned, pa.Array | pa.ChunkedArray):
                    returned = returned.to_pylist()
                answers = batch_outcomes(refs, returned)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
                answers = [_outcome_or_raise(error)] * len(refs)
            yield self._answered(refs, answers, begin)

    def _lists(self, handler: BatchHandler, batch: pa.RecordBatch, active: Callable[[Told], None]) -> list[Outcome]:
        refs = self._begun(batch, active)
        begin = time.perf_counter_ns()
        answers: list[Any] = [None] * len(refs)
        jobs: list[tuple[int, Job]] = []
        for i, (job, packed) in enumerate(jobs_of(batch)):
            try:
                job.payload = self.codec.unpack(packed)
                jobs.append((i, job))
            except ValueError as error:
                answers[i] = error
        listed = [job for _, job in jobs]
        try:
            with resumed():
                returned = handler.function(listed)
                if isinstance(returned, Awaitable):
                    returned = asyncio.run(_awaited(returned))
            found = batch_outcomes(listed, returned)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            found = [_outcome_or_raise(error)] * len(listed)
        for (i, _), answer in zip(jobs, found, strict=True):
            answers[i] = answer
        return self._answered(refs, answers, begin)

    def _singly(self, batch: pa.RecordBatch, active: Callable[[Told], None]) -> Iterator[list[Outcome]]:
        done: list[Outcome] = []
        last = time.monotonic()
        refs = references(batch)
        # The events of the next jobs go out together, and no earlier than the chunk before is settled.
        told = 0
        for i, (job, packed) in enumerate(jobs_of(batch)):
            if i == told:
                ahead = refs[told : told + _ahead(done, last)]
                active([ref[1:] for ref in ahead])
                told += len(ahead)
            begin = time.perf_counter_ns()
            try:
                call = self._find(job.name)
                job.payload = self.codec.unpack(packed)
                with resumed():
                    answer = call(job)
                    if isinstance(answer, Awaitable):
                        answer = asyncio.run(_awaited(answer))
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
                answer = _outcome_or_raise(error)
            done.append(self._answer(refs[i], answer, begin))
            if i + 1 == told and (len(done) >= SETTLE_JOBS or time.monotonic() - last >= SETTLE_AFTER_S):
                yield done
                done, last = [], time.monotonic()
        if done:
            yield done

    async def _together(self, batch: pa.RecordBatch, active: Callable[[Told], None]) -> list[Outcome]:
        refs = self._begun(batch, active)
        slots = asyncio.Semaphore(self.concurrency)

        async def one(i: int, job: Job, packed: bytes) -> Outcome:
            async with slots:
                begin = time.perf_counter_ns()
                try:
                    job.payload = self.codec.unpack(packed)
                    answer = self._find(job.name)(job)
                    if isinstance(answer, Awaitable):
                        answer = await answer
                except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
                    answer = _outcome_or_raise(error)
                return self._answer(refs[i], answer, begin)

        return list(await asyncio.gather(*(one(i, *found) for i, found in enumerate(jobs_of(batch)))))

    def _asynchronous(self) -> bool:
        if isinstance(self.handler, Router):
            return any(is_async(one) for one in [*self.handler.handlers.values(), self.handler.default])
        return is_async(self.handler)

    def _find(self, name: str) -> Callable[[Any], Any]:
        if not isinstance(self.handler, Router):
            return self.handler  # type: ignore[return-value]
        found = self.handler.find(name)
        if found is None:
            text = f"no handler for the name {name!r:.80}"
            raise UnrecoverableError(text) if self.unknown_name == "dlq" else LookupError(text)
        return found

    def _begun(self, batch: pa.RecordBatch, active: Callable[[Told], None]) -> list[Reference]:
        refs = references(batch)
        active([ref[1:] for ref in refs])
        return refs

    def _answered(self, refs: Sequence[Reference], answers: Sequence[Any], begin: int) -> list[Outcome]:
        if any(answer is not None for answer in answers):
            return [self._answer(ref, answer, begin) for ref, answer in zip(refs, answers, strict=True)]
        took_us = (time.perf_counter_ns() - begin) // 1000
        done = ("", "", None)
        return [Outcome(i, OK, None, *done, job_id, name, runs, took_us, True) for i, job_id, name, runs in refs]

    def _answer(self, ref: Reference, answer: Any, begin: int) -> Outcome:
        entry_id, job_id, name, attempt = ref
        took_us = (time.perf_counter_ns() - begin) // 1000
        packed = None
        if answer is not None and self.store_results and not isinstance(answer, BaseException):
            try:
                packed = self.codec.pack(answer)
            except ValueError as error:
                answer = error
        if not isinstance(answer, BaseException):
            return Outcome(entry_id, OK, packed, "", "", None, job_id, name, attempt, took_us, True)
        try:
            asked = asked_ms(answer)
        except ValueError:
            asked = None
        outcome = FAIL if is_unrecoverable(answer) else RETRY
        told, reason = describe(answer), reason_of(answer)
        return Outcome(entry_id, outcome, None, told, reason, asked, job_id, name, attempt, took_us, True)


Reference = tuple[bytes, str, str, int]
"""What an outcome says about its job: entry id, job id, name, attempt."""


def _ahead(done: list[Outcome], last: float) -> int:
    """How many jobs to announce at a time: as many as will probably be run before the next settling."""
    if not done:
        return 1
    each_s = max(1e-6, (time.monotonic() - last) / len(done))
    return max(1, min(SETTLE_JOBS - len(done), int(SETTLE_AFTER_S / 10 / each_s)))


def _outcome_or_raise(error: BaseException) -> BaseException:
    """Only the task's own end is not an outcome of the job."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    return error


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def references(batch: pa.RecordBatch) -> list[Reference]:
    """What outcomes need of the rows."""
    ids = [entry_id.encode() for entry_id in batch.column("entry_id").to_pylist()]
    names = [name or "" for name in batch.column("name").to_pylist()]
    found = zip(ids, batch.column("id").to_pylist(), names, batch.column("attempt").to_pylist(), strict=True)
    return list(found)


def jobs_of(batch: pa.RecordBatch) -> Iterator[tuple[Job, bytes]]:
    """The rows as jobs, their payloads still packed."""
    created = batch.column("created_at").cast(pa.int64()).to_pylist()
    retries = batch.column("retry").to_pylist()
    payloads = batch.column("payload").to_pylist()
    for (entry_id, job_id, name, attempt), at, retry, packed in zip(
        references(batch), created, retries, payloads, strict=True
    ):
        yield Job(job_id, name, None, (at or 0) // 1000, attempt, _retry(retry), entry_id.decode()), packed or b""


def _retry(found: dict[str, Any] | None) -> RetryOverride | None:
    if found is None:
        return None
    backoff = found["backoff"]
    return RetryOverride(found["max_attempts"], None if backoff is None else Backoff(**backoff))
