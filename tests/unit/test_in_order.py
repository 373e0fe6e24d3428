"""InOrder: calls behind the caller's back, in order, and no error is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from chasqui_spark.in_order import InOrder


def test_all_calls_are_made_in_order_before_the_block_ends() -> None:
    made: list[int] = []
    gate = threading.Event()

    with InOrder("t") as later:
        later.do(lambda _: gate.wait(5), None)
        for number in range(3):
            later.do(made.append, number)
        assert made == []
        gate.set()

    assert made == [0, 1, 2]


def fail(text: str) -> Any:
    raise ValueError(text)


def test_an_error_is_raised_at_the_end_and_nothing_is_called_after_it() -> None:
    made: list[int] = []

    def use() -> None:
        with InOrder("t") as later:
            gate = threading.Event()
            later.do(lambda _: gate.wait(5), None)
            later.do(fail, "first")
            later.do(made.append, 1)
            later.do(fail, "second")
            gate.set()

    with pytest.raises(ValueError, match="first"):
        use()
    assert made == []


def test_an_error_is_raised_by_the_next_call() -> None:
    asked = 0

    def use() -> None:
        nonlocal asked
        with InOrder("t") as later:
            for asked in range(100):  # far more than may wait
                later.do(fail, "later" if asked else "first")

    with pytest.raises(ValueError, match="first"):
        use()
    assert asked < 10


def test_an_error_of_the_block_is_not_covered_and_calls_before_it_are_made() -> None:
    made: list[int] = []

    def use() -> None:
        with InOrder("t") as later:
            later.do(made.append, 1)
            later.do(fail, "behind")
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert made == [1]


def test_few_calls_wait_at_a_time() -> None:
    gate = threading.Event()
    asked = 0
    with InOrder("t") as later:

        def ask() -> None:
            nonlocal asked
            for _ in range(20):
                later.do(lambda _: gate.wait(5), None)
                asked += 1

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(0.3)
        assert asked <= 6
        gate.set()
        thread.join(5)

    assert asked == 20
