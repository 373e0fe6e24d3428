"""What worker() refuses at the call, before it touches Spark or a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chasqui import ChasquiError, ConfigError, Router, batch
from chasqui_spark import arrow_batch, worker
from chasqui_spark.worker_arguments import WorkerArguments, check_handler, checked_trigger


class Session:
    """As much of a session as is looked at before anything is done with it."""

    readStream = None  # noqa: N815 (Spark's name)

    def __init__(self, speculation: str = "false") -> None:
        self.conf = {"spark.speculation": speculation}


def two(a: Any, b: Any) -> None: ...


def none() -> None: ...


def generator(job: Any) -> Any:
    yield job


async def async_generator(job: Any) -> Any:
    yield job


class Callable2:
    def __call__(self, a: Any, b: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (None, "handler expects a function, a Router or a batch handler, got NoneType"),
        ("print", "got str"),
        (Callable2, "got the class Callable2"),
        (two, r"function of one argument, the job; got one of \(a: 'Any', b: 'Any'\)"),
        (none, "function of one argument, the job"),
        (Callable2(), "function of one argument, the job"),
        (generator, "got a generator, whose body would never run"),
        (async_generator, "got a generator"),
        (batch()(two), "function of one argument, the list of jobs"),
        (arrow_batch()(two), "function of one argument, the table"),
        (Router(), "expects a Router with handlers, got an empty one"),
        (Router().on("mail", two), "the handler for 'mail' expects a function of one argument"),
        (Router(default=none), "the default handler expects a function of one argument"),
        (partial(print, threading.Lock()), "cannot be sent to executors .*cannot pickle '_thread.lock'"),
    ],
)
def test_a_handler_that_cannot_work_is_refused(handler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker(Session(), queue="q", handler=handler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "handler", [print, len, partial(two, 1), lambda *_: None, batch()(generator), Router().on("a", print)]
)
def test_a_handler_that_may_work_is_taken(handler: Any) -> None:
    check_handler(handler)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queues": "a,b"}, "expects one of queue, queues and queue_pattern; got queue and queues"),
        ({"queue": None}, "got none"),
        ({"queue": "a{b"}, "queue expects a name without braces"),
        ({"queue": None, "queues": ["a"]}, "queues expects text"),
        ({"mode": "observe"}, "mode is the worker's own business"),
        ({"starting_offsets": "latest"}, "starting_offsets is the worker's own business"),
        ({"max_attemps": 3}, "did you mean max_attempts"),
        ({"max_attempts": -1}, "max_attempts expects a whole number from 0"),
        ({"concurrency": 0}, "concurrency expects a whole number from 1 to 100000, got 0"),
        ({"concurrency": "many"}, "concurrency expects"),
        ({"unknown_name": "x"}, "unknown_name expects one of fail, dlq, got 'x'"),
        ({"raw": 3}, "raw expects true or false, got 3"),
        ({"checkpoint": 3}, "checkpoint expects text, got 3"),
        ({"checkpoint": " "}, "checkpoint expects text, got an empty one"),
        ({"name": ""}, "name expects text, got an empty one"),
        ({"trigger": "5 seconds"}, "trigger expects one of .*; got '5 seconds'"),
        ({"trigger": {"availableNow": True, "processingTime": "1 second"}}, "trigger expects one of"),
        ({"trigger": {"availablenow": True}}, "trigger expects one of"),
        ({"trigger": {"availableNow": False}}, "trigger expects one of"),
        ({"trigger": {"processingTime": 5}}, "trigger expects one of"),
        ({"trigger": {"continuous": "1 second"}}, "trigger expects one of"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ChasquiError, match=message):
        worker(Session(), **({"queue": "q", "handler": print} | given))  # type: ignore[arg-type]


def test_what_is_no_session_is_refused() -> None:
    with pytest.raises(ConfigError, match="spark expects a SparkSession, got NoneType"):
        worker(None, queue="q", handler=print)  # type: ignore[arg-type]


def test_arguments_that_may_be_meant_are_taken() -> None:
    assert WorkerArguments(checkpoint=Path("/tmp/c")).checkpoint == "/tmp/c"  # type: ignore[arg-type]
    assert checked_trigger(None) == {}
    for trigger in ({"availableNow": True}, {"once": True}, {"processingTime": "5 seconds"}):
        assert checked_trigger(trigger) == trigger


def test_speculation_is_warned_about() -> None:
    def start(speculation: str) -> None:
        worker(Session(speculation), queue="q", handler=print)  # type: ignore[arg-type]

    silent: Callable[[], None] = partial(start, "false")
    with pytest.raises(AttributeError):  # there is no Spark behind it
        silent()
    with pytest.warns(UserWarning, match=r"spark\.speculation is true"), pytest.raises(AttributeError):
        start("true")
