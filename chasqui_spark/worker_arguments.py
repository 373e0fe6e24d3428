"""What ``worker()`` is given, checked at the call: a handler that cannot be called would show as dead letters."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chasqui import ConfigError, OptionError, Router
from chasqui.bridge import BatchHandler, check, option
from chasqui_spark.handling import ArrowHandler

_TRIGGERS = (
    '{"processingTime": "5 seconds"}, {"availableNow": True} or {"once": True}; without a trigger batch follows batch'
)


@dataclass(frozen=True, kw_only=True)
class WorkerArguments:
    """What ``worker()`` takes besides the options of ``mode=consume``."""

    checkpoint: str | None = option(None, help="Spark's checkpointLocation.")
    name: str | None = option(None, help="The query's name.")
    raw: bool = option(False, help="As in Consumer.")
    datetimes: bool = option(False, help="As in Consumer.")
    concurrency: int = option(100, min=1, max=100_000, help="Coroutines at a time in each task.")
    unknown_name: str = option("fail", choices=("fail", "dlq"), help="As in Consumer.")

    def __post_init__(self) -> None:
        if isinstance(self.checkpoint, os.PathLike):
            object.__setattr__(self, "checkpoint", os.fspath(self.checkpoint))
        check(self)
        for name in ("checkpoint", "name"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise OptionError(f"{name} expects text, got an empty one: leave it out instead")


def checked_trigger(trigger: Any) -> Mapping[str, Any]:
    """A trigger as Spark's ``trigger()`` takes it; empty for none."""
    if trigger is None:
        return {}
    if not isinstance(trigger, Mapping) or len(trigger) != 1:
        raise OptionError(f"trigger expects one of {_TRIGGERS}; got {trigger!r:.80}")
    ((kind, value),) = trigger.items()
    fits = value is True if kind in ("availableNow", "once") else kind == "processingTime" and isinstance(value, str)
    if not fits:
        raise OptionError(f"trigger expects one of {_TRIGGERS}; got {trigger!r:.80}")
    return trigger


def check_handler(handler: Any) -> None:
    """Refuse what cannot be called with a job, or, where it is a batch handler, with a batch."""
    if isinstance(handler, Router) and not handler.handlers and handler.default is None:
        raise ConfigError("handler expects a Router with handlers, got an empty one: add them with on(name, handler)")
    for what, function, takes in _functions(handler):
        if not callable(function) or isinstance(function, type):
            got = f"the class {function.__name__}" if isinstance(function, type) else type(function).__name__
            raise ConfigError(f"{what} expects a function, a Router or a batch handler, got {got}")
        if takes == "job" and any(
            inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, function.__call__)
        ):
            raise ConfigError(f"{what} expects a function that returns, got a generator, whose body would never run")
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # some built-in functions have none
            continue
        try:
            signature.bind(None)
        except TypeError as error:
            raise ConfigError(
                f"{what} expects a function of one argument, the {takes}; got one of {signature!s:.80} ({error})"
            ) from None


def _functions(handler: Any) -> Iterator[tuple[str, Any, str]]:
    """The functions in a handler: what to call each in an error, and what it takes."""
    if isinstance(handler, Router):
        for name, one in handler.handlers.items():
            yield f"the handler for {name!r:.80}", one, "job"
        if handler.default is not None:
            yield "the default handler", handler.default, "job"
    elif isinstance(handler, BatchHandler | ArrowHandler):
        yield "handler", handler.function, "list of jobs" if isinstance(handler, BatchHandler) else "table"
    else:
        yield "handler", handler, "job"
