"""What users give a Consumer: plain functions, coroutines, batch handlers, and tables of them by job name."""

from __future__ import annotations

import inspect
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chasqui.errors import ConfigError, UnrecoverableError
from chasqui.job import Job

Handler = Callable[[Any], Any]

MAX_ERROR_BYTES = 2048
_FRAMES = 5


@dataclass(frozen=True, slots=True)
class BatchHandler:
    """A handler of many jobs at a time; made by ``batch``."""

    function: Callable[[list[Any]], Any]
    max_jobs: int
    max_wait_ms: int


def batch(*, max_jobs: int = 100, max_wait_ms: int = 10) -> Callable[[Callable[[list[Any]], Any]], BatchHandler]:
    """Make a function a batch handler: it gets a list of jobs and returns a list of outcomes, one each, in order.

    An outcome is the job's result (None for none), or an exception, which fails that job alone. Returning None for
    the whole list means that all are done; raising fails all. A batch starts when ``max_jobs`` are there, or
    ``max_wait_ms`` after its first.
    """
    for name, value, least, most in (("max_jobs", max_jobs, 1, 100_000), ("max_wait_ms", max_wait_ms, 0, 86_400_000)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{name} expects a whole number from {least} to {most}, got {value!r:.80}")
    return lambda function: BatchHandler(function, max_jobs, max_wait_ms)


class Router:
    """Handlers by job name.

    >>> router = Router().on("welcome", send_welcome).on("invoice", send_invoice)

    ``default`` gets the jobs whose names are not in the table. Without one, the Consumer's ``unknown_name`` decides.
    """

    def __init__(self, default: Handler | None = None) -> None:
        self.default = _checked("default", default) if default is not None else None
        self.handlers: dict[str, Handler] = {}

    def on(self, name: str, handler: Handler) -> Router:
        """Add a handler for a name; returns the router."""
        if not isinstance(name, str):
            raise ConfigError(f"name expects text, got {type(name).__name__}")
        if name in self.handlers:
            raise ConfigError(f"the router has a handler for {name!r:.80} already")
        self.handlers[name] = _checked("handler", handler)
        return self

    def find(self, name: str) -> Handler | None:
        return self.handlers.get(name, self.default)


def _checked(what: str, handler: Any) -> Handler:
    if isinstance(handler, BatchHandler) or not callable(handler):
        raise ConfigError(f"{what} expects a function of one job, got {type(handler).__name__}")
    return handler  # type: ignore[no-any-return]


def is_async(handler: Any) -> bool:
    """Whether calling it gives something to await: a coroutine function, or an object whose call is one."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def outcomes(jobs: Sequence[Job], returned: Any) -> list[Any]:
    """A batch handler's answer, one per job; an answer that does not fit is an exception for all."""
    if returned is None:
        return [None] * len(jobs)
    try:
        found = list(returned)
    except TypeError:
        found = []
    if len(found) != len(jobs):
        error = ConfigError(f"the batch handler returned {len(found)} outcomes for {len(jobs)} jobs")
        return [error] * len(jobs)
    return found


def is_unrecoverable(error: BaseException) -> bool:
    """Ours, or that of ChasquiMQ's own package: handlers may be shared with it."""
    return isinstance(error, UnrecoverableError) or any(
        cls.__name__ == "UnrecoverableError" and cls.__module__.partition(".")[0] == "chasquimq"
        for cls in type(error).__mro__
    )


def reason_of(error: BaseException) -> str:
    """The text of an error as events carry it: the message, cut."""
    try:
        message = getattr(error, "message", None)
        return (message if isinstance(message, str) else str(error))[:1024]
    except BaseException:  # noqa: BLE001 - an error whose text is an error, too
        return f"a {type(error).__name__} without readable text"


def brief(error: BaseException) -> str:
    """An error on one line of a log: type, first line of the message, and where it was raised."""
    frames = deque(traceback.walk_tb(error.__traceback__), maxlen=1)
    where = "".join(f" ({frame.f_code.co_filename}:{line})" for frame, line in frames)
    return f"{type(error).__name__}: {reason_of(error).partition(chr(10))[0][:200]}{where}"


def describe(error: BaseException) -> str:
    """An error for the dead letter: type, message and last frames, at most two kilobytes."""
    head = f"{type(error).__name__}: {reason_of(error)}"
    # Frames only, not their source lines: a deep recursion has a hundred thousand.
    frames = deque(traceback.walk_tb(error.__traceback__), maxlen=_FRAMES)
    lines = [f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in reversed(frames)]
    text = "\n".join([head[: MAX_ERROR_BYTES // 2], *lines])
    return text.encode(errors="replace")[:MAX_ERROR_BYTES].decode(errors="ignore")
