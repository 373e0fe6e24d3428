"""Handlers on executors: rows of claimed jobs in, outcomes out. No I/O but what handlers do themselves."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from types import FrameType
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
from chasqui_spark.reports import Reports


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

    def run(self, pages: Iterator[pa.RecordBatch], reports: Reports) -> Iterator[list[bool]]:
        """Run the handler on all rows of one queue, and report it; whether they are done, as it becomes known."""
        with paused(), noticing_interrupts() as interrupted:
            yield from _Task(self, reports, interrupted).run(pages)


class _Task:
    """One task's use of a handler."""

    def __init__(self, handling: Handling, reports: Reports, interrupted: Callable[[], bool]) -> None:
        self._with, self._handler = handling, handling.handler
        self._reports, self._interrupted = reports, interrupted
        self._pid = os.getpid()

    def run(self, pages: Iterator[pa.RecordBatch]) -> Iterator[list[bool]]:
        handler = self._handler
        if isinstance(handler, ArrowHandler | BatchHandler):
            call = self._table if isinstance(handler, ArrowHandler) else self._list
            for page in pages:
                for start in range(0, page.num_rows, handler.max_jobs):
                    yield self._batch(page.slice(start, handler.max_jobs), call)
        elif self._asynchronous():
            with resumed():
                done = asyncio.run(self._together(pages))
            yield done
        else:
            for page in pages:
                yield [self._single(ref, job, packed) for ref, job, packed in jobs_of(page)]

    def _batch(self, rows: pa.RecordBatch, call: Callable[[pa.RecordBatch], list[Any]]) -> list[bool]:
        columns = _columns(rows)
        self._reports.start(list(zip(*columns[1:], repeat(None))))
        begin = time.perf_counter_ns()
        try:
            answers = call(rows)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            answers = [self._raised(error)] * rows.num_rows
        self._still_here()
        outcomes = self._outcomes(columns, answers, begin)
        self._reports.end(outcomes)
        return [one.outcome == OK for one in outcomes]

    def _table(self, rows: pa.RecordBatch) -> list[Any]:
        returned = _called(self._handler.function, pa.Table.from_batches([rows]))  # type: ignore[union-attr]
        if isinstance(returned, pa.Array | pa.ChunkedArray):
            returned = returned.to_pylist()
        return batch_outcomes(range(rows.num_rows), returned)  # type: ignore[arg-type]

    def _list(self, rows: pa.RecordBatch) -> list[Any]:
        answers: list[Any] = []
        jobs: list[Job] = []
        for _, job, packed in jobs_of(rows):
            try:
                job.payload = self._with.codec.unpack(packed)
                jobs.append(job)
                answers.append(None)
            except ValueError as error:
                answers.append(error)
        try:
            returned = _called(self._handler.function, jobs) if jobs else None  # type: ignore[union-attr]
            found = iter(batch_outcomes(jobs, returned))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            found = repeat(self._raised(error))
        return [next(found) if answer is None else answer for answer in answers]

    def _single(self, ref: Reference, job: Job, packed: bytes) -> bool:
        self._reports.start([(*ref[1:], None)])
        begin = time.perf_counter_ns()
        try:
            call = self._find(job.name)
            job.payload = self._with.codec.unpack(packed)
            answer = _called(call, job)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is an outcome
            answer = self._raised(error)
        self._still_here()
        outcome = self._outcome(ref, answer, begin)
        self._reports.end([outcome])
        return outcome.outcome == OK

    async def _together(self, pages: Iterator[pa.RecordBatch]) -> list[bool]:
        """So many at a time over all pages: none waits for the slowest of the page before."""
        done: list[bool] = []
        slots = asyncio.Semaphore(self._with.concurrency)

        async def one(ref: Reference, job: Job, packed: bytes) -> None:
            self._reports.start([(*ref[1:], None)])
            begin = time.perf_counter_ns()
            try:
                job.payload = self._with.codec.unpack(packed)
                answer = self._find(job.name)(job)
                if isinstance(answer, Awaitable):
                    answer = await answer
            except BaseException as error:
                if _cancelled():
                    raise
                answer = self._raised(error)
            self._still_here()
            outcome = self._outcome(ref, answer, begin)
            await self._reports.end_soon([outcome])
            done.append(outcome.outcome == OK)

        try:
            async with asyncio.TaskGroup() as running:
                while (page := await asyncio.to_thread(next, pages, None)) is not None:
                    for found in jobs_of(page):
                        await slots.acquire()
                        self._reports.check()
                        running.create_task(one(*found)).add_done_callback(lambda _: slots.release())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return done

    def _asynchronous(self) -> bool:
        if isinstance(self._handler, Router):
            return any(is_async(one) for one in [*self._handler.handlers.values(), self._handler.default])
        return is_async(self._handler)

    def _find(self, name: str) -> Callable[[Any], Any]:
        if not isinstance(self._handler, Router):
            return self._handler  # type: ignore[return-value]
        found = self._handler.find(name)
        if found is None:
            text = f"no handler for the name {name!r:.80}"
            raise UnrecoverableError(text) if self._with.unknown_name == "dlq" else LookupError(text)
        return found

    def _raised(self, error: BaseException) -> BaseException:
        """The error as an outcome. Only the end of the task is none: somebody pressed Ctrl-C."""
        if isinstance(error, KeyboardInterrupt) and self._interrupted():
            raise error
        self._still_here(error)
        return error

    def _still_here(self, error: BaseException | None = None) -> None:
        """A handler that forks may come back twice. The child must not do the task's work once more."""
        if os.getpid() != self._pid:
            code = error.code if isinstance(error, SystemExit) else error
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(code if isinstance(code, int) else int(code is not None))

    def _outcomes(self, columns: Columns, answers: Sequence[Any], begin: int) -> list[Outcome]:
        if any(answer is not None for answer in answers):
            found = zip(zip(*columns, strict=True), answers, strict=True)
            return [self._outcome(ref, answer, begin) for ref, answer in found]
        took_us = (time.perf_counter_ns() - begin) // 1000
        alike = map(repeat, (OK, None, "", "", None)), map(repeat, (took_us, True))
        return list(map(_outcome_of, zip(columns[0], *alike[0], *columns[1:], *alike[1], strict=False)))

    def _outcome(self, ref: Reference, answer: Any, begin: int) -> Outcome:
        entry_id, job_id, name, attempt = ref
        took_us = (time.perf_counter_ns() - begin) // 1000
        packed = None
        if answer is not None and self._with.store_results and not isinstance(answer, BaseException):
            try:
                packed = self._with.codec.pack(answer)
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

Columns = tuple[list[bytes], list[str], list[str], list[int]]
"""The same of many jobs."""

# A named tuple of what is in order already, in a third of the time that its constructor takes.
_outcome_of: Callable[[Any], Outcome] = partial(tuple.__new__, Outcome)


@contextmanager
def noticing_interrupts() -> Iterator[Callable[[], bool]]:
    """Tells a KeyboardInterrupt that somebody has sent from one that a handler has raised."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: True
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _cancelled() -> bool:
    """Whether the task's end, and not the handler, has stopped this coroutine."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _called(function: Callable[[Any], Any], argument: Any) -> Any:
    gc.enable()  # as resumed() does, in a fifth of the time
    try:
        answer = function(argument)
        return answer if answer is None or not isinstance(answer, Awaitable) else asyncio.run(_awaited(answer))
    finally:
        gc.disable()


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _columns(batch: pa.RecordBatch) -> Columns:
    """What outcomes need of the rows."""
    names = batch.column("name")
    return (
        batch.column("entry_id").cast(pa.binary()).to_pylist(),
        batch.column("id").to_pylist(),
        names.fill_null("").to_pylist() if names.null_count else names.to_pylist(),
        batch.column("attempt").to_pylist(),
    )


def jobs_of(batch: pa.RecordBatch) -> Iterator[tuple[Reference, Job, bytes]]:
    """The rows as jobs, their payloads still packed."""
    created = batch.column("created_at").cast(pa.int64()).to_pylist()
    retries = batch.column("retry").to_pylist()
    payloads = batch.column("payload").to_pylist()
    for ref, at, retry, packed in zip(zip(*_columns(batch), strict=True), created, retries, payloads, strict=True):
        entry_id, job_id, name, attempt = ref
        job = Job(job_id, name, None, (at or 0) // 1000, attempt, _retry(retry), entry_id.decode())
        yield ref, job, packed or b""


def _retry(found: dict[str, Any] | None) -> RetryOverride | None:
    if found is None:
        return None
    backoff = found["backoff"]
    return RetryOverride(found["max_attempts"], None if backoff is None else Backoff(**backoff))
