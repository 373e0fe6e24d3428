"""Calls made one after the other by a thread of their own, while the caller goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_WAITING = 4


class InOrder:
    """A context manager: when the block ends all calls have been made.

    What the first failing call raises is raised again by the next ``do``, or else at the end of the block, and nothing
    is called after it. With ``_WAITING`` calls not yet made ``do`` waits, so memory stays bounded.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.Queue[tuple[Callable[[Any], object], Any] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> InOrder:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._calls.put(None)
        self._thread.join()
        if error is None:
            self._check()

    def do(self, call: Callable[[T], object], argument: T) -> None:
        self._check()
        self._calls.put((call, argument))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            if self._error is None:
                call, argument = item
                try:
                    call(argument)
                except BaseException as error:  # noqa: BLE001 - it is the caller's
                    self._error = error
