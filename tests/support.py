"""Tools for tests only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from chasqui.protocol.flow import Flow, Step

T = TypeVar("T")


def eventually(check: Callable[[], T], *, within: float = 10.0, every: float = 0.02) -> T:
    """Wait until ``check`` returns something true, and return it; its last answer is in the failure."""
    deadline = time.monotonic() + within
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s; last answer: {answer!r}")
        time.sleep(every)


def drive(flow: Flow[T], replies: list[Any]) -> tuple[T, list[Step]]:
    """Run a flow by hand: each step is answered with the next reply, exceptions are thrown. Gives result and steps."""
    steps: list[Step] = []
    step = next(flow)
    for reply in replies:
        steps.append(step)
        try:
            step = flow.throw(reply) if isinstance(reply, Exception) else flow.send(reply)
        except StopIteration as stop:
            return stop.value, steps
    raise AssertionError(f"the flow wants more replies; it stands at {step!r}")
