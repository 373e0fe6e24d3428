"""Handlers on rows: who gets what, and what their answers mean."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest

from chasqui import Backoff, RetryLater, RetryOverride, Router, UnrecoverableError, batch
from chasqui.bridge import Outcome, PayloadCodec
from chasqui.protocol.codec import Envelope, encode_envelope
from chasqui_spark.handling import AnyHandler, Handling, arrow_batch, jobs_of
from chasqui_spark.options import SourceOptions
from chasqui_spark.reports import Reports, Start
from chasqui_spark.rows import Rows

RETRY = RetryOverride(5, Backoff.fixed(7))


def rows(*payloads: Any, names: tuple[str, ...] = (), retry: Any = None) -> Any:
    entries = []
    for i, payload in enumerate(payloads):
        packed = payload if isinstance(payload, bytes) else msgpack.packb(payload)
        data = encode_envelope(Envelope(f"j{i}", packed, 1000 + i, i, retry))
        entries.append((b"1795000000000-%d" % i, [b"d", data, b"n", (names[i] if names else "").encode()]))
    return Rows(SourceOptions(queue="q")).batch("q", entries)


class Told:
    """What the server would be told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[Outcome] = []
        self.heard = threading.Event()

    def active(self, jobs: Sequence[Start]) -> None:
        self.started += [job_id for job_id, _, _, _ in jobs]

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        self.ended += outcomes
        self.heard.set()


def run(handler: AnyHandler, *pages: Any, told: Told | None = None, **options: Any) -> tuple[list[Outcome], list[str]]:
    """The outcomes by job, and the jobs in the order in which they were begun."""
    told = told or Told()
    with Reports(told) as reports:
        done = [one for some in Handling(handler, PayloadCodec(), **options).run(iter(pages), reports) for one in some]
    assert done == [one.outcome == "ok" for one in told.ended]
    return sorted(told.ended, key=lambda one: str(one.job_id)), told.started


def shown(outcomes: list[Outcome]) -> list[tuple[str | None, str]]:
    return [(one.job_id, one.outcome) for one in outcomes]


def test_jobs_are_what_the_rows_say() -> None:
    ((_, job, packed), _) = list(jobs_of(rows({"a": 1}, 2, retry=RETRY)))

    assert (job.id, job.created_at_ms, job.attempt, job.retry, job.entry_id) == (
        "j0",
        1000,
        0,
        RETRY,
        "1795000000000-0",
    )
    assert packed == msgpack.packb({"a": 1})


def answer(job: Any) -> Any:
    if isinstance(job.payload, int) and job.payload < 0:
        raise {-1: ValueError("no"), -2: UnrecoverableError("never"), -3: RetryLater(9)}[job.payload]
    return job.payload


def test_a_function_gets_jobs_one_by_one_and_what_it_raises_is_an_outcome() -> None:
    outcomes, told = run(answer, rows(1, -1, -2, -3, b"\xc1"), store_results=True)

    assert shown(outcomes) == [("j0", "ok"), ("j1", "retry"), ("j2", "fail"), ("j3", "retry"), ("j4", "retry")]
    assert outcomes[0].result == msgpack.packb(1)
    assert outcomes[1].error.startswith("ValueError: no")
    assert (outcomes[1].reason, outcomes[3].delay_ms) == ("no", 9)
    assert told == ["j0", "j1", "j2", "j3", "j4"]


def test_results_are_kept_only_when_asked_for_and_one_that_does_not_pack_is_a_failed_run() -> None:
    outcomes, _ = run(lambda job: object() if job.payload else 1, rows(0, 1), store_results=True)
    unasked, _ = run(lambda _: object(), rows(1))

    assert shown(outcomes) == [("j0", "ok"), ("j1", "retry")]
    assert shown(unasked) == [("j0", "ok")]


def test_coroutines_run_together() -> None:
    import asyncio

    most = now = 0

    async def count(job: Any) -> int:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return int(job.payload)

    outcomes, _ = run(count, rows(*range(20)), concurrency=5)

    assert {one.job_id for one in outcomes} == {f"j{i}" for i in range(20)}
    assert most == 5


def test_coroutines_of_the_next_page_do_not_wait_for_the_slowest_of_this_one() -> None:
    import asyncio

    async def first_waits_for_last(job: Any) -> None:
        if job.payload == "last":
            last.set()
        elif job.payload == "first":
            await asyncio.wait_for(last.wait(), 10)

    last = asyncio.Event()
    outcomes, _ = run(first_waits_for_last, rows("first", 1), rows(2, "last"), concurrency=2)

    assert [one.outcome for one in outcomes] == ["ok"] * 4


def test_a_coroutine_that_cancels_itself_keeps_nobody_from_starting() -> None:
    import asyncio

    async def cancels(job: Any) -> None:
        if job.payload:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    outcomes, _ = run(cancels, rows(1, 1, 0), concurrency=1)

    assert shown(outcomes) == [("j2", "ok")]  # the others are left over, and count as unsettled


def test_a_router_finds_handlers_by_name_and_unknown_names_go_the_chosen_way() -> None:
    router = Router().on("a", lambda _: 1)
    table = rows(1, 2, names=("a", "b"))

    assert shown(run(router, table)[0]) == [("j0", "ok"), ("j1", "retry")]
    assert shown(run(router, table, unknown_name="dlq")[0]) == [("j0", "ok"), ("j1", "fail")]


def test_a_batch_handler_gets_lists_of_at_most_so_many_and_never_a_payload_that_is_none() -> None:
    sizes: list[int] = []

    @batch(max_jobs=2)
    def lists(jobs: list[Any]) -> list[Any]:
        sizes.append(len(jobs))
        return [answer_or_error(job) for job in jobs]

    def answer_or_error(job: Any) -> Any:
        return ValueError("x") if job.payload == 2 else None

    outcomes, _ = run(lists, rows(1, b"\xc1", 2, 3))

    assert sizes == [1, 2]
    assert shown(outcomes) == [("j0", "ok"), ("j1", "retry"), ("j2", "retry"), ("j3", "ok")]


def test_an_arrow_handler_gets_tables() -> None:
    sizes: list[int] = []

    @arrow_batch(max_jobs=3)
    def tables(table: Any) -> Any:
        sizes.append(table.num_rows)
        return None if table.num_rows == 3 else table.column("attempt")

    outcomes, told = run(tables, rows(*range(4)), store_results=True)

    assert sizes == [3, 1]
    assert [one.result for one in outcomes] == [None, None, None, msgpack.packb(3)]
    assert len(told) == 4


def test_handlers_of_batches_may_be_coroutine_functions() -> None:
    @arrow_batch()
    async def tables(table: Any) -> list[int]:
        return [1] * int(table.num_rows)

    @batch()
    async def lists(jobs: list[Any]) -> list[Any]:
        return [ValueError("odd") if job.payload % 2 else 1 for job in jobs]

    assert [one.outcome for one in run(tables, rows(1, 2))[0]] == ["ok", "ok"]
    assert [one.outcome for one in run(lists, rows(1, 2))[0]] == ["retry", "ok"]


def raising(_: Any) -> None:
    raise SystemExit(1)


def too_few(_: Any) -> list[int]:
    return [1]


@pytest.mark.parametrize("function", [raising, too_few])
@pytest.mark.parametrize("kind", [batch(max_jobs=10), arrow_batch()])
def test_a_batch_that_raises_or_answers_for_others_fails_all_its_jobs(kind: Any, function: Any) -> None:
    outcomes, _ = run(kind(function), rows(1, 2))

    assert [one.outcome for one in outcomes] == ["retry", "retry"]


def test_a_slow_handler_does_not_hold_back_what_is_done() -> None:
    told = Told()

    def second_waits(job: Any) -> None:
        if job.payload == 2:
            assert told.heard.wait(10)

    outcomes, _ = run(second_waits, rows(1, 2, 3), told=told)

    assert [one.outcome for one in outcomes] == ["ok"] * 3


def test_a_slow_coroutine_does_not_hold_back_what_is_done() -> None:
    import asyncio

    told = Told()

    async def second_waits(job: Any) -> None:
        if job.payload == 2:
            assert await asyncio.to_thread(told.heard.wait, 10)

    outcomes, _ = run(second_waits, rows(1, 2, 3), told=told)

    assert [one.outcome for one in outcomes] == ["ok"] * 3


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_what_would_end_a_program_fails_its_job_alone(error: type[BaseException]) -> None:
    def raises(job: Any) -> None:
        if job.payload:
            raise error(0)

    async def awaits(job: Any) -> None:
        raises(job)

    for handler in (raises, awaits):
        outcomes, _ = run(handler, rows(0, 1, 0))

        assert [one.outcome for one in outcomes] == ["ok", "retry", "ok"]


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


@pytest.mark.parametrize(
    "error", [Unreadable(), ValueError("caf\udce9"), ValueError("x" * 10_000_000)], ids=["raises", "surrogate", "long"]
)
def test_an_error_without_usable_text_fails_its_job_alone(error: Exception) -> None:
    def raises(job: Any) -> None:
        if job.payload:
            raise error

    outcomes, _ = run(raises, rows(0, 1, 0))

    assert [one.outcome for one in outcomes] == ["ok", "retry", "ok"]
    assert len(outcomes[1].error.encode()) <= 2048


def test_an_interrupt_from_outside_ends_the_task() -> None:
    told = Told()

    def interrupted(job: Any) -> None:
        if job.payload:
            os.kill(os.getpid(), signal.SIGINT)

    async def awaiting(job: Any) -> None:
        interrupted(job)

    for handler in (interrupted, awaiting):
        with pytest.raises(KeyboardInterrupt):
            run(handler, rows(0, 1, 2), told=told)

    assert [one.job_id for one in told.ended] == ["j0", "j0"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12 and newer
@pytest.mark.parametrize("leaves", ["by exit", "by return", "by error"])
def test_a_child_that_a_handler_forks_does_not_do_the_rest_of_the_task(leaves: str) -> None:
    codes: list[int] = []

    def forks(job: Any) -> None:
        child = os.fork()
        if child:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif leaves == "by exit":
            raise SystemExit(3)
        elif leaves == "by error":
            raise ValueError

    outcomes, _ = run(forks, rows(1, 2))

    assert [one.outcome for one in outcomes] == ["ok", "ok"]
    assert codes == [{"by exit": 3, "by return": 0, "by error": 1}[leaves]] * 2
