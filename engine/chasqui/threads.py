"""Threads for handlers that are plain functions.

The standard executor joins its threads when the interpreter ends, so one stuck handler would keep a worker process
alive past its deadline. These are daemons: what is stuck ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class Threads:
    """At most ``most`` threads, started as they are needed."""

    def __init__(self, most: int, loop: asyncio.AbstractEventLoop) -> None:
        self._most, self._loop = most, loop
        self._work: queue.SimpleQueue[tuple[Callable[[Any], Any], Any, asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = 0
        self._busy = 0

    async def run(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call the function in a thread; what it raises is raised here."""
        future = self._loop.create_future()
        self._busy += 1
        if self._busy > self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._thread, name=f"chasqui-{self._threads}", daemon=True).start()
        self._work.put((function, argument, future))
        try:
            return await future
        finally:
            self._busy -= 1

    def close(self) -> None:
        """Let the threads end that are not at work."""
        for _ in range(self._threads):
            self._work.put(None)

    def _thread(self) -> None:
        while (item := self._work.get()) is not None:
            function, argument, future = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = function(argument)
            except StopIteration as stop:  # means something else to coroutines
                error = RuntimeError(f"the handler raised StopIteration: {stop}")
            except BaseException as raised:  # noqa: BLE001 - SystemExit too is the job's failure, not the thread's end
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(_resolve, future, result, error)


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
