"""The tree of errors, its codes, and pickling across processes."""

from __future__ import annotations

import copy
import pickle

import pytest

import chasqui
from chasqui import errors
from chasqui.errors import BulkInterrupted, ChasquiError, ConnectionLost, RetryLater
from chasqui.options import ProducerOptions

CODES = {
    "ChasquiError": "CMQ-000",
    "ConfigError": "CMQ-004",
    "OptionError": "CMQ-004",
    "CronError": "CMQ-004",
    "NoFutureFire": "CMQ-004",
    "PayloadError": "CMQ-002",
    "DecodeError": "CMQ-003",
    "RedisError": "CMQ-001",
    "ConnectionLost": "CMQ-001",
    "AuthFailed": "CMQ-001",
    "ReadOnlyServer": "CMQ-001",
    "OutOfMemory": "CMQ-001",
    "ServerError": "CMQ-001",
    "WrongKeyType": "CMQ-001",
    "QueueFull": "CMQ-301",
    "BulkInterrupted": "CMQ-302",
    "EmbeddedServerError": "CMQ-303",
    "StageExpired": "CMQ-304",
    "LedgerAhead": "CMQ-305",
    "LedgerBroken": "CMQ-306",
    "CheckpointInUse": "CMQ-307",
    "DataLoss": "CMQ-308",
    "ResultTimeout": "CMQ-102",
    "HandlerError": "CMQ-010",
    "UnrecoverableError": "CMQ-011",
    "RetryLater": "CMQ-012",
}


def all_classes(root: type[ChasquiError] = ChasquiError) -> list[type[ChasquiError]]:
    """The root and every class below it, found by walking: a new one cannot be forgotten."""
    return [root, *(c for sub in root.__subclasses__() for c in all_classes(sub))]


def public_classes() -> list[type[ChasquiError]]:
    return [c for c in all_classes() if not c.__name__.startswith("_")]


def example(cls: type[ChasquiError]) -> ChasquiError:
    if issubclass(cls, BulkInterrupted):
        return cls("stopped", added=["a"], unknown=1, ids=["a", "b", "c"])
    if issubclass(cls, ConnectionLost):
        return cls("lost", sent=True)
    if issubclass(cls, RetryLater):
        return cls(1500, "busy")
    if cls.__name__ == "_BadValue":
        return cls("pool_size", "a number", "'x'")  # type: ignore[call-arg]
    return cls("what happened")


def test_every_class_has_its_code() -> None:
    assert {c.__name__: c.code for c in public_classes()} == CODES


def test_every_class_is_public() -> None:
    assert {c.__name__ for c in public_classes()} <= set(chasqui.__all__)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("OptionError", ValueError),
        ("CronError", ValueError),
        ("NoFutureFire", ValueError),
        ("PayloadError", ValueError),
        ("DecodeError", ValueError),
        ("ResultTimeout", TimeoutError),
    ],
)
def test_error_is_also_the_builtin_one_that_people_catch(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)


@pytest.mark.parametrize(
    ("name", "parent"),
    [
        ("OptionError", "ConfigError"),
        ("CronError", "ConfigError"),
        ("NoFutureFire", "CronError"),
        ("ConnectionLost", "RedisError"),
        ("AuthFailed", "RedisError"),
        ("ReadOnlyServer", "RedisError"),
        ("OutOfMemory", "RedisError"),
        ("ServerError", "RedisError"),
        ("UnrecoverableError", "HandlerError"),
        ("RetryLater", "HandlerError"),
    ],
)
def test_error_stands_under_its_parent(name: str, parent: str) -> None:
    assert issubclass(getattr(errors, name), getattr(errors, parent))


@pytest.mark.parametrize("cls", all_classes(), ids=lambda c: c.__name__)
def test_error_pickles_with_its_attributes(cls: type[ChasquiError]) -> None:
    error = example(cls)

    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), again.args, vars(again)) == (cls, str(error), error.args, vars(error))


@pytest.mark.parametrize("cls", all_classes(), ids=lambda c: c.__name__)
def test_error_can_be_copied(cls: type[ChasquiError]) -> None:
    error = example(cls)

    again = copy.copy(error)

    assert (type(again), str(again), vars(again)) == (cls, str(error), vars(error))


@pytest.mark.parametrize("cls", all_classes(), ids=lambda c: c.__name__)
def test_text_starts_with_the_code_and_message_is_without(cls: type[ChasquiError]) -> None:
    error = example(cls)

    assert str(error) == f"[{cls.code}] {error.message}"
    assert cls.code not in error.message


def test_pickled_bulk_interrupted_tells_what_was_written() -> None:
    error = BulkInterrupted("stopped", added=("a",), unknown=1, ids=("a", "b", "c"))

    again = pickle.loads(pickle.dumps(error))

    assert (again.added, again.acknowledged, again.unknown, again.ids) == (["a"], 1, 1, ["a", "b", "c"])


@pytest.mark.parametrize("sent", [True, False])
def test_pickled_connection_lost_tells_whether_the_command_had_left(sent: bool) -> None:
    assert pickle.loads(pickle.dumps(ConnectionLost("lost", sent=sent))).sent is sent


def test_pickled_retry_later_keeps_its_delay() -> None:
    again = pickle.loads(pickle.dumps(RetryLater(1500)))

    assert (again.delay_ms, again.message) == (1500, "retry asked for in 1500 ms")


def test_notes_survive_pickling() -> None:
    error = ChasquiError("what happened")
    error.add_note("while closing")

    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while closing"]


def test_error_of_a_bad_value_pickles() -> None:
    with pytest.raises(errors.OptionError) as caught:
        ProducerOptions(pool_size=0)

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_unrecoverable_error_needs_no_message() -> None:
    assert errors.UnrecoverableError().message == ""
