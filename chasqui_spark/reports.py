"""What becomes of jobs, told to the server by a thread of its own while handlers run on."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

from chasqui.bridge import Outcome

T = TypeVar("T")
Start = tuple[str, str, int, None]
"""A run that begins: job id, name, runs before it; how long it takes is not known."""

SEND_AFTER_S = 0.1
SEND_JOBS = 1000
"""Sent when so many runs have ended, or so long after the first of them: a slow handler does not hold back what the
others have done.
"""

_MOST_WAITING = 8 * SEND_JOBS  # two pages: the server is never without work
_BYTES_LIKE_A_JOB = 1000  # of results, which wait in memory too


class Target(Protocol):
    """Who is told; both may block."""

    def active(self, jobs: Sequence[Start]) -> None: ...

    def settle(self, outcomes: Sequence[Outcome]) -> object: ...


class Reports:
    """A context manager: when the block ends everything has been told, every start before its end.

    What the target raises is raised again by the next ``check`` or ``end``, or else at the end of the block, and
    nothing is told after it.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._started: deque[Sequence[Start]] = deque()
        self._ended: deque[Sequence[Outcome]] = deque()
        # Each of the two is counted up by one thread only.
        self._taken_in = self._told = 0
        self._over = False
        self._error: BaseException | None = None
        self._wake, self._moved = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="chasqui-outcomes", daemon=True)

    def __enter__(self) -> Reports:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._over = True
        self._wake.set()
        self._thread.join()
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise what telling has raised."""
        if self._error is not None:
            raise self._error

    def start(self, jobs: Sequence[Start]) -> None:
        """Handlers of these jobs begin."""
        self._started.append(jobs)

    def end(self, outcomes: Sequence[Outcome]) -> None:
        """They have ended. Waits while too much is untold, so that memory stays bounded."""
        self._take_in(outcomes)
        while self._behind():
            self._moved.clear()
            if self._behind():
                self._moved.wait()
        self.check()

    async def end_soon(self, outcomes: Sequence[Outcome]) -> None:
        """``end`` for coroutines: the others run on while this one waits, and errors are left to ``check``."""
        self._take_in(outcomes)
        while self._behind():  # noqa: ASYNC110 - it is a thread that changes it
            await asyncio.sleep(SEND_AFTER_S / 10)

    def _take_in(self, outcomes: Sequence[Outcome]) -> None:
        self._ended.append(outcomes)
        self._taken_in += _weight(outcomes)
        if self._taken_in - self._told >= SEND_JOBS and not self._wake.is_set():
            self._wake.set()

    def _behind(self) -> bool:
        return self._taken_in - self._told > _MOST_WAITING and self._error is None

    def _run(self) -> None:
        over = False
        while not over:
            self._wake.wait(SEND_AFTER_S)
            self._wake.clear()
            over = self._over
            # The ends first: the starts of all of them are there by now.
            ended = _all(self._ended)
            started = _all(self._started)
            if self._error is None:
                try:
                    if started:
                        self._target.active(started)
                    if ended:
                        self._target.settle(ended)
                except BaseException as error:  # noqa: BLE001 - it is the caller's
                    self._error = error
            self._told += _weight(ended)
            self._moved.set()


def _all(waiting: deque[Sequence[T]]) -> list[T]:
    return [item for _ in range(len(waiting)) for item in waiting.popleft()]


def _weight(outcomes: Sequence[Outcome]) -> int:
    return len(outcomes) + sum(len(one.result) // _BYTES_LIKE_A_JOB for one in outcomes if one.result is not None)
