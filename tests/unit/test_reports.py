"""Reports: telling behind the back of handlers, each start before its end, and no error is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from chasqui.bridge import OK, Outcome
from chasqui_spark.reports import SEND_JOBS, Reports, Start


class Target:
    """Notes what it is told; ``then`` is called with each settling."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.told: list[str] = []
        self._then = then

    def active(self, jobs: Sequence[Start]) -> None:
        self.told += [f"start {job_id}" for job_id, _, _, _ in jobs]

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        self.told += [f"end {one.job_id}" for one in outcomes]
        self._then()


def ended(*ids: int, result: bytes | None = None) -> list[Outcome]:
    return [Outcome(b"%d-0" % i, OK, result, job_id=str(i)) for i in ids]


def test_all_is_told_before_the_block_ends_each_start_before_its_end() -> None:
    target = Target()

    with Reports(target) as reports:
        for number in range(5000):
            reports.start([(str(number), "", 0, None)])
            reports.end(ended(number))

    place = {line: i for i, line in enumerate(target.told)}
    assert len(place) == len(target.told) == 10_000
    assert all(place[f"start {number}"] < place[f"end {number}"] for number in range(5000))


def test_few_are_told_although_nothing_follows() -> None:
    heard = threading.Event()

    with Reports(Target(heard.set)) as reports:
        reports.end(ended(1))

        assert heard.wait(10)


def refuse() -> None:
    raise ValueError("refused")


def test_an_error_is_raised_by_what_follows_and_nothing_is_told_after_it() -> None:
    target = Target(refuse)
    asked = 0

    def use() -> None:
        nonlocal asked
        with Reports(target) as reports:
            while asked < 100:  # far more than may wait
                asked += 1
                reports.end(ended(*range(SEND_JOBS)))

    with pytest.raises(ValueError, match="refused"):
        use()
    assert asked < 20
    assert len(target.told) <= 12 * SEND_JOBS


def test_an_error_behind_the_last_call_is_raised_at_the_end() -> None:
    def use() -> None:
        with Reports(Target(refuse)) as reports:
            reports.end(ended(1))

    with pytest.raises(ValueError, match="refused"):
        use()


def test_an_error_of_the_block_is_not_covered_and_what_came_before_it_is_told() -> None:
    target = Target(refuse)

    def use() -> None:
        with Reports(target) as reports:
            reports.end(ended(1))
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert target.told == ["end 1"]


@pytest.mark.parametrize("result", [None, bytes(1 << 20)], ids=["jobs", "large results"])
def test_little_waits_at_a_time(result: bytes | None) -> None:
    gate = threading.Event()
    asked = 0
    each = 1 if result else SEND_JOBS

    with Reports(Target(gate.wait)) as reports:

        def ask() -> None:
            nonlocal asked
            for _ in range(20):
                reports.end(ended(*range(each), result=result))
                asked += 1

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(0.3)
        assert asked <= 12
        gate.set()
        thread.join(10)

    assert asked == 20


def test_coroutines_run_on_while_one_waits_for_room() -> None:
    gate = threading.Event()

    async def use(reports: Reports) -> None:
        await reports.end_soon(ended(*range(SEND_JOBS)))
        waiting = asyncio.create_task(reports.end_soon(ended(*range(9 * SEND_JOBS))))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        await waiting

    with Reports(Target(lambda: gate.wait(10))) as reports:
        asyncio.run(use(reports))
