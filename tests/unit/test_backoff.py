"""Waits between retries, against the bounds that the original kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from chasqui.backoff import RetryDefaults, backoff_bounds_ms, backoff_ms
from chasqui.job import U64_MAX, Backoff

Case = dict[str, Any]
CASES: list[Case] = json.loads((Path(__file__).parents[1] / "golden" / "backoff.json").read_text())["cases"]

every_case = pytest.mark.parametrize("case", [pytest.param(c, id=f"{c['group']}-{i}") for i, c in enumerate(CASES)])


def asked(case: Case) -> tuple[Backoff | None, RetryDefaults, int]:
    """The recorded question; non-finite multipliers are recorded as text, and other kinds are read as unknown."""
    spec = case["spec"]
    if spec is not None:
        kind = spec["kind"] if spec["kind"] in ("fixed", "exponential") else "unknown"
        multiplier = None if spec["multiplier"] is None else float(spec["multiplier"])
        spec = Backoff(kind, spec["delay_ms"], spec["max_delay_ms"], multiplier, spec["jitter_ms"])
    defaults = case["queue_defaults"]
    return spec, RetryDefaults(**{**defaults, "multiplier": float(defaults["multiplier"])}), case["n"]


@every_case
def test_bounds_are_the_originals(case: Case) -> None:
    base, span = backoff_bounds_ms(*asked(case))

    assert (base, min(U64_MAX, base + max(0, span - 1))) == (case["min_ms"], case["max_ms_exclusive"] - 1)


@every_case
def test_no_jitter_gives_the_lower_bound(case: Case) -> None:
    assert backoff_ms(*asked(case), jitter=0.0) == case["min_ms"]


@every_case
def test_high_jitter_stays_below_the_upper_bound(case: Case) -> None:
    assert case["min_ms"] <= backoff_ms(*asked(case), jitter=0.999999) < case["max_ms_exclusive"]


@every_case
def test_highest_jitter_gives_the_last_value_below_the_upper_bound(case: Case) -> None:
    assert backoff_ms(*asked(case), jitter=math.nextafter(1.0, 0.0)) == case["max_ms_exclusive"] - 1


def test_job_without_backoff_takes_all_of_the_queues_settings() -> None:
    settings = RetryDefaults(initial_backoff_ms=7, max_backoff_ms=50, multiplier=3.0, jitter_ms=4)

    assert [backoff_bounds_ms(None, settings, n) for n in (1, 2, 3)] == [(7, 4), (21, 4), (50, 4)]


def test_what_the_job_leaves_open_comes_from_the_queue() -> None:
    settings = RetryDefaults(initial_backoff_ms=7, max_backoff_ms=50, multiplier=3.0, jitter_ms=4)

    assert [backoff_bounds_ms(Backoff.exponential(10), settings, n) for n in (1, 2, 3)] == [(10, 4), (30, 4), (50, 4)]


def test_zero_in_the_job_is_not_taken_for_open() -> None:
    spec = Backoff.exponential(10, max_delay_ms=0, multiplier=0.0, jitter_ms=0)

    assert backoff_bounds_ms(spec, RetryDefaults(), 2) == (0, 0)
