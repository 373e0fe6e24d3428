"""Starting and stopping a standing role: from asyncio, from a blocking program, and by signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("chasqui.runner")


@contextlib.contextmanager
def _calm_collector() -> Iterator[None]:
    """Garbage collection for a process that does nothing but this.

    A worker makes and drops some ten objects per job, none of them in cycles. With the defaults, looking through them
    over and over takes a good part of its time (seen: 58,000 jobs a second, and 81,000 with collection switched off).
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Close the loop, with a little time for what still runs on it: a handler that ignores being cancelled would
    hold up asyncio.run for ever.
    """
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=1))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class Runner:
    """Base of the standing roles. A subclass has ``async run(...)``, which ends soon after ``stop``."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stop_asked = False
        self.ended_at_once = False
        """Whether a second signal has ended ``run_sync``, in the middle of whatever ran."""

    def stop(self) -> None:
        """Ask it to end: from any thread, from a signal handler, also before it runs."""
        self._stop_asked = True
        loop, event = self._loop, self._stop
        if loop is not None and event is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile, and the run with it
                loop.call_soon_threadsafe(event.set)

    def run_sync(self, *args: Any) -> None:
        """Run until SIGTERM, SIGINT or ``stop`` ends it in good order; a second signal ends it at once."""
        self.ended_at_once = False
        with _calm_collector():
            loop = asyncio.new_event_loop()
            try:
                loop.run_until_complete(self._with_signals(*args))
            finally:
                _end(loop)

    async def run(self, *args: Any) -> None:
        raise NotImplementedError

    def _starting(self) -> asyncio.Event:
        """To be called first in ``run``; the event is set when it shall end."""
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._stop_asked:
            self._stop.set()
        return self._stop

    async def _with_signals(self, *args: Any) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(self.run(*args))
        seen = 0

        def on_signal() -> None:
            nonlocal seen
            seen += 1
            if seen == 1:
                log.info("ending in good order; a second signal ends it at once")
                self.stop()
            else:
                self.ended_at_once = True
                task.cancel()

        installed = []
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, on_signal)
                installed.append(number)
            except (ValueError, RuntimeError, NotImplementedError):
                pass  # not in the main thread: then signals are the program's business
        try:
            await task
        except asyncio.CancelledError:
            if not self.ended_at_once:
                raise
        finally:
            for number in installed:
                loop.remove_signal_handler(number)
