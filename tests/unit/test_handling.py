"""Handlers on rows: who gets what, and what their answers mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from chasqui import Backoff, ConfigError, RetryLater, RetryOverride, Router, UnrecoverableError, batch
from chasqui.bridge import Outcome, PayloadCodec
from chasqui.protocol.codec import Envelope, encode_envelope
from chasqui_spark.handling import AnyHandler, Handling, arrow_batch, jobs_of
from chasqui_spark.options import SourceOptions
from chasqui_spark.rows import Rows

RETRY = RetryOverride(5, Backoff.fixed(7))


def rows(*payloads: Any, names: tuple[str, ...] = (), retry: Any = None) -> Any:
    entries = []
    for i, payload in enumerate(payloads):
        packed = payload if isinstance(payload, bytes) else msgpack.packb(payload)
        data = encode_envelope(Envelope(f"j{i}", packed, 1000 + i, i, retry))
        entries.append((b"1795000000000-%d" % i, [b"d", data, b"n", (names[i] if names else "").encode()]))
    return Rows(SourceOptions(queue="q")).batch("q", entries)


def run(handler: AnyHandler, table: Any, **options: Any) -> tuple[list[Outcome], list[str]]:
    told: list[str] = []
    handling = Handling(handler, PayloadCodec(), **options)
    found = [one for some in handling.run(table, lambda jobs: told.extend(j for j, _, _ in jobs)) for one in some]
    return found, told


def shown(outcomes: list[Outcome]) -> list[tuple[str | None, str]]:
    return [(one.job_id, one.outcome) for one in outcomes]


def test_jobs_are_what_the_rows_say() -> None:
    ((job, packed), _) = list(jobs_of(rows({"a": 1}, 2, retry=RETRY)))

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

    assert [one.job_id for one in outcomes] == [f"j{i}" for i in range(20)]
    assert most == 5


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


def raising(_: Any) -> None:
    raise SystemExit(1)


def too_few(_: Any) -> list[int]:
    return [1]


@pytest.mark.parametrize("function", [raising, too_few])
@pytest.mark.parametrize("kind", [batch(max_jobs=10), arrow_batch()])
def test_a_batch_that_raises_or_answers_for_others_fails_all_its_jobs(kind: Any, function: Any) -> None:
    outcomes, _ = run(kind(function), rows(1, 2))

    assert [one.outcome for one in outcomes] == ["retry", "retry"]


@pytest.mark.parametrize("handler", [None, 3, "print"])
def test_what_is_no_handler_is_refused(handler: Any) -> None:
    with pytest.raises(ConfigError, match="handler expects"):
        Handling(handler, PayloadCodec())


def test_a_slow_handler_does_not_hold_back_what_is_done() -> None:
    import time

    def slow(_: Any) -> None:
        time.sleep(0.3)

    parts: Iterator[list[Outcome]] = Handling(slow, PayloadCodec()).run(rows(1, 2, 3, 4), lambda _: None)

    assert len(next(parts)) == 2
