"""What users give a consumer, and what is made of what handlers raise and return."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from chasqui import ConfigError, Job, RetryLater, Router, UnrecoverableError, batch
from chasqui.handlers import (
    MAX_ERROR_BYTES,
    BatchHandler,
    describe,
    is_async,
    is_unrecoverable,
    outcomes,
    reason_of,
)

JOBS = [Job(f"j{n}", "", n, 1, 0, None, "1-1") for n in range(3)]


async def coroutine(job: Any) -> None: ...


def plain(job: Any) -> None: ...


class AsyncCall:
    async def __call__(self, job: Any) -> None: ...


class PlainCall:
    def __call__(self, job: Any) -> None: ...


def raised(error: BaseException) -> BaseException:
    """The error as a handler raises it: with frames."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


# Kinds of handlers


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (coroutine, True),
        (AsyncCall(), True),
        (functools.partial(coroutine), True),
        (AsyncCall().__call__, True),
        (plain, False),
        (PlainCall(), False),
        (functools.partial(plain), False),
        (print, False),
    ],
    ids=["coroutine", "object", "partial", "method", "function", "plain object", "plain partial", "builtin"],
)
def test_a_handler_is_known_to_be_awaited_or_not(handler: Any, expected: bool) -> None:
    assert is_async(handler) is expected


def test_batch_makes_a_batch_handler() -> None:
    made = batch(max_jobs=5, max_wait_ms=0)(plain)

    assert made == BatchHandler(plain, 5, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"max_jobs": 0},
        {"max_jobs": True},
        {"max_jobs": 1.5},
        {"max_jobs": "3"},
        {"max_wait_ms": -1},
        {"max_wait_ms": 2**70},
    ],
    ids=repr,
)
def test_a_batch_of_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        batch(**options)


# Tables


def test_a_router_finds_by_name_and_else_its_default() -> None:
    router = Router(default=plain).on("a", coroutine).on("", PlainCall())

    assert router.find("a") is coroutine
    assert isinstance(router.find(""), PlainCall)
    assert router.find("other") is plain
    assert Router().find("other") is None


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigError, match="already"):
        Router().on("a", plain).on("a", coroutine)


@pytest.mark.parametrize("handler", [None, 3, batch()(plain)], ids=["None", "a number", "a batch handler"])
def test_a_router_takes_functions_of_one_job_only(handler: Any) -> None:
    with pytest.raises(ConfigError, match="expects a function of one job"):
        Router().on("a", handler)
    if handler is not None:
        with pytest.raises(ConfigError, match="expects a function of one job"):
            Router(default=handler)


@pytest.mark.parametrize("name", [None, 3, b"a"], ids=repr)
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(ConfigError, match="name expects text"):
        Router().on(name, plain)


# Outcomes of a batch


def test_an_answer_of_none_means_that_all_are_done() -> None:
    assert outcomes(JOBS, None) == [None, None, None]


@pytest.mark.parametrize("answer", [[1, 2, 3], (1, 2, 3), iter([1, 2, 3])], ids=["list", "tuple", "iterator"])
def test_an_answer_of_the_right_length_is_taken_in_order(answer: Any) -> None:
    assert outcomes(JOBS, answer) == [1, 2, 3]


@pytest.mark.parametrize("answer", [[], [1, 2], [1, 2, 3, 4], 7, object()], ids=["0", "2", "4", "int", "object"])
def test_an_answer_that_does_not_fit_is_an_error_for_all(answer: Any) -> None:
    errors = outcomes(JOBS, answer)

    assert len(errors) == 3
    assert all(isinstance(error, ConfigError) and "for 3 jobs" in error.message for error in errors)


# What is raised


def test_unrecoverable_is_ours_and_what_derives_from_it() -> None:
    class Derived(UnrecoverableError):
        pass

    assert is_unrecoverable(UnrecoverableError("x"))
    assert is_unrecoverable(Derived("x"))
    assert not is_unrecoverable(ValueError("x"))
    assert not is_unrecoverable(RetryLater(1))


def test_the_originals_unrecoverable_counts_as_ours() -> None:
    native = type("UnrecoverableError", (RuntimeError,), {"__module__": "chasquimq.errors"})

    assert is_unrecoverable(native("x"))
    assert is_unrecoverable(type("Derived", (native,), {})("x"))


def test_an_unrelated_class_merely_named_unrecoverable_is_retried() -> None:
    """As the original's Python package does: only its own class counts, whatever others are called."""
    unrelated = type("UnrecoverableError", (Exception,), {"__module__": "somebody.else"})

    assert not is_unrecoverable(unrelated("x"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("boom"), "boom"),
        (ValueError(), ""),
        (ValueError(1, 2), "(1, 2)"),
        (KeyError("k"), "'k'"),
        (UnrecoverableError("no such user"), "no such user"),
        (RetryLater(5), "retry asked for in 5 ms"),
    ],
    ids=repr,
)
def test_the_reason_of_an_error_is_its_text_without_a_code(error: Exception, expected: str) -> None:
    assert reason_of(error) == expected


def test_a_long_reason_is_cut() -> None:
    assert reason_of(ValueError("x" * 100_000)) == "x" * 1024


def test_a_description_has_type_message_and_the_last_frames_innermost_first() -> None:
    def inner() -> None:
        raise ValueError("boom")

    def outer() -> None:
        inner()

    try:
        outer()
    except ValueError as error:
        head, *frames = describe(error).splitlines()

    assert head == "ValueError: boom"
    assert [frame.rpartition(" in ")[2] for frame in frames] == [
        "inner",
        "outer",
        "test_a_description_has_type_message_and_the_last_frames_innermost_first",
    ]
    assert all(f"{__file__}:" in frame for frame in frames)


def test_a_description_of_a_deep_error_holds_a_few_frames_only() -> None:
    def dig(depth: int) -> None:
        if depth == 0:
            raise ValueError("boom")
        dig(depth - 1)

    with pytest.raises(ValueError, match="boom") as caught:
        dig(100)

    assert len(describe(caught.value).splitlines()) == 6


@pytest.mark.parametrize(
    "text", ["x" * 5000, "日" * 5000, "a\n" * 5000, "\udcff" * 5000], ids=["x", "日", "lines", "bad"]
)
def test_a_description_has_at_most_two_kilobytes_of_whole_characters(text: str) -> None:
    described = describe(raised(ValueError(text)))

    assert 1000 <= len(described.encode()) <= MAX_ERROR_BYTES == 2048
    assert described.startswith("ValueError: ")


def test_a_long_message_leaves_room_for_the_frames() -> None:
    assert " in raised" in describe(raised(ValueError("x" * 5000)))


def test_an_error_without_frames_is_described_by_its_head() -> None:
    assert describe(ValueError("boom")) == "ValueError: boom"


def test_an_error_whose_text_cannot_be_had_is_still_described() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert describe(Unspeakable()).startswith("Unspeakable")
    assert isinstance(reason_of(Unspeakable()), str)
