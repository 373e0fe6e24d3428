"""The values that users make and hold."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from chasqui.errors import ConfigError
from chasqui.job import Backoff, DlqEntry, Job, NewJob, RetryOverride, Stats

JOB = Job(id="j", name="n", payload={"a": 1}, created_at_ms=5, attempt=0, retry=None, entry_id="1-0")
VALUES = [
    Backoff.fixed(5),
    RetryOverride(3, Backoff.fixed(5)),
    NewJob({"a": 1}, id="j", name="n", retry=RetryOverride(3), delay_ms=5),
    JOB,
    DlqEntry("2-0", "1-0", "unrecoverable", None, b"\x94", "n", JOB, "ValueError: no"),
    Stats(waiting=1, pending=2, delayed=3, dlq=4, oldest_age_ms=5, paused=False),
]


def test_fixed_backoff_has_no_multiplier() -> None:
    assert Backoff.fixed(250, max_delay_ms=9, jitter_ms=1) == Backoff("fixed", 250, 9, None, 1)


def test_exponential_backoff_leaves_open_what_is_not_given() -> None:
    assert Backoff.exponential(250) == Backoff("exponential", 250, None, None, None)


def test_whole_multiplier_becomes_a_float() -> None:
    multiplier = Backoff.exponential(1, multiplier=2).multiplier

    assert (multiplier, type(multiplier)) == (2.0, float)


@pytest.mark.parametrize("multiplier", [0, -2.0, math.inf, -math.inf, math.nan])
def test_any_float_may_be_the_multiplier(multiplier: float) -> None:
    assert repr(Backoff.exponential(1, multiplier=multiplier).multiplier) == repr(float(multiplier))


@pytest.mark.parametrize("value", [0, 2**64 - 1])
@pytest.mark.parametrize("name", ["delay_ms", "max_delay_ms", "jitter_ms"])
def test_backoff_takes_64_bits(name: str, value: int) -> None:
    assert getattr(Backoff(**{"kind": "fixed", "delay_ms": 1, name: value}), name) == value


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, "1", True, [1]])
@pytest.mark.parametrize("name", ["delay_ms", "max_delay_ms", "jitter_ms"])
def test_backoff_refuses_what_is_not_a_64_bit_number(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Backoff {name} expects a whole number from 0 to {2**64 - 1}, got "):
        Backoff(**{"kind": "fixed", "delay_ms": 1, name: value})


def test_backoff_needs_a_delay() -> None:
    with pytest.raises(ConfigError, match="Backoff delay_ms expects a whole number, got None"):
        Backoff.fixed(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["linear", "Fixed", "", None, 1, [], b"fixed"])
def test_backoff_refuses_other_kinds(kind: Any) -> None:
    with pytest.raises(ConfigError, match="Backoff kind expects fixed or exponential, got "):
        Backoff(kind, 1)


@pytest.mark.parametrize("multiplier", ["2", True, [2], 2j, 10**400], ids=["text", "bool", "list", "complex", "huge"])
def test_backoff_refuses_a_multiplier_that_is_no_float(multiplier: Any) -> None:
    with pytest.raises(ConfigError, match="Backoff multiplier expects a number, got "):
        Backoff.exponential(1, multiplier=multiplier)


@pytest.mark.parametrize("limit", [None, 0, 1, 2**32 - 1])
def test_max_attempts_takes_32_bits(limit: int | None) -> None:
    assert RetryOverride(limit).max_attempts == limit


@pytest.mark.parametrize("limit", [-1, 2**32, 1.0, "3", True])
def test_max_attempts_refuses_what_is_not_a_32_bit_number(limit: Any) -> None:
    with pytest.raises(
        ConfigError, match="RetryOverride max_attempts expects a whole number from 0 to 4294967295, got "
    ):
        RetryOverride(limit)


@pytest.mark.parametrize("backoff", [250, "fixed", {"kind": "fixed", "delay_ms": 1}, RetryOverride()])
def test_retry_override_refuses_what_is_not_a_backoff(backoff: Any) -> None:
    with pytest.raises(ConfigError, match="RetryOverride backoff expects a Backoff, got "):
        RetryOverride(backoff=backoff)


def test_new_job_takes_only_its_payload_by_position() -> None:
    with pytest.raises(TypeError):
        NewJob({"a": 1}, "job-1")  # type: ignore[misc]


def test_new_job_needs_nothing_but_a_payload() -> None:
    assert dataclasses.asdict(NewJob(None)) == {
        "payload": None,
        "id": None,
        "name": "",
        "retry": None,
        "delay_ms": None,
        "run_at_ms": None,
    }


def test_job_needs_every_field() -> None:
    with pytest.raises(TypeError):
        Job(id="j", name="n", payload=None, created_at_ms=5, attempt=0, retry=None)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_value_has_no_room_for_misspelt_attributes(value: Any) -> None:
    with pytest.raises((AttributeError, TypeError)):
        value.atempt = 1


@pytest.mark.parametrize("value", [v for v in VALUES if v is not JOB], ids=lambda v: type(v).__name__)
def test_value_cannot_be_changed(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_value_pickles(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
