"""What becomes of a failed run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from chasqui import Backoff, RetryLater, RetryOverride
from chasqui.options import ConsumerOptions
from chasqui.verdicts import LONGEST_WAIT_MS, Again, GiveUp, Rules, after_failure, asked_ms

RULES = Rules.of(ConsumerOptions(max_attempts=3, retry_initial_backoff_ms=100, retry_jitter_ms=0))


def verdict(run: int, retry: RetryOverride | None = None, **given: Any) -> Again | GiveUp:
    return after_failure(RULES, run, retry, **({"unrecoverable": False, "asked_ms": None, "jitter": 0.0} | given))


def test_runs_are_counted_against_the_jobs_own_budget_before_the_workers() -> None:
    assert [verdict(run) for run in (1, 2, 3)] == [Again(100), Again(200), GiveUp("retries_exhausted")]
    assert verdict(1, RetryOverride(1)) == GiveUp("retries_exhausted")
    assert verdict(3, RetryOverride(9)) == Again(400)


def test_a_job_may_bring_its_own_backoff_and_a_handler_its_own_wait() -> None:
    retry = RetryOverride(None, Backoff.fixed(7, jitter_ms=10))

    assert verdict(1, retry, jitter=0.5) == Again(12)
    assert verdict(1, retry, asked_ms=5) == Again(5)
    assert verdict(1, retry, asked_ms=-5) == Again(0)
    assert verdict(1, asked_ms=10**30) == Again(LONGEST_WAIT_MS)


def test_unrecoverable_beats_every_budget() -> None:
    assert verdict(1, RetryOverride(100), unrecoverable=True, asked_ms=5) == GiveUp("unrecoverable")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(), None),
        (RetryLater(5), 5),
        (RetryLater(timedelta(seconds=2)), 2000),
        (RetryLater(-1), 0),
        (RetryLater(10**400), 10**400),
    ],
)
def test_a_wait_is_asked_for_by_retry_later_only(error: Exception, expected: int | None) -> None:
    assert asked_ms(error) == expected


@pytest.mark.parametrize("wait", ["soon", float("nan"), True])
def test_a_wait_that_makes_no_sense_is_said_to_be_so(wait: Any) -> None:
    with pytest.raises(ValueError, match="RetryLater expects milliseconds"):
        asked_ms(RetryLater(wait))
