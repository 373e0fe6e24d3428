"""What becomes of a job whose run failed: again later, or never. Decided here for every kind of worker. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from chasqui.backoff import RetryDefaults, backoff_ms
from chasqui.errors import RetryLater
from chasqui.intake import Limits, budget
from chasqui.job import RetryOverride
from chasqui.options import Settling
from chasqui.protocol.codec import Envelope, encode_envelope, encode_member

LONGEST_WAIT_MS = 100 * 365 * 86_400_000  # a score beyond that would lose its last digits in a double


@dataclass(frozen=True, slots=True)
class Again:
    """Run it once more, so much later."""

    wait_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Move it to the dead letters."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rules:
    """A worker's own rules, for what jobs leave open."""

    limits: Limits
    defaults: RetryDefaults

    @classmethod
    def of(cls, options: Settling) -> Rules:
        return cls(
            Limits(options.max_attempts, options.max_payload_bytes),
            RetryDefaults(
                options.retry_initial_backoff_ms,
                options.retry_max_backoff_ms,
                options.retry_multiplier,
                options.retry_jitter_ms,
            ),
        )


def after_failure(
    rules: Rules, run: int, retry: RetryOverride | None, *, unrecoverable: bool, asked_ms: int | None, jitter: float
) -> Again | GiveUp:
    """The verdict on the ``run``-th run (from 1). ``asked_ms`` is a wait that the handler chose itself; ``jitter`` is a
    random number in [0, 1).
    """
    if unrecoverable:
        return GiveUp("unrecoverable")
    if run >= budget(retry, rules.limits):
        return GiveUp("retries_exhausted")
    if asked_ms is None:
        asked_ms = backoff_ms(retry.backoff if retry else None, rules.defaults, run, jitter)
    return Again(min(max(0, asked_ms), LONGEST_WAIT_MS))


def asked_ms(error: BaseException) -> int | None:
    """The wait that a handler asks for; None where it asks for none. ``ValueError`` for one that makes no sense."""
    if not isinstance(error, RetryLater):
        return None
    wait: Any = getattr(error, "delay_ms", None)  # a subclass may not have called our __init__
    if isinstance(wait, timedelta):
        wait = wait.total_seconds() * 1000
    endless = isinstance(wait, float) and not math.isfinite(wait)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or endless:
        raise ValueError(f"RetryLater expects milliseconds or a timedelta, got {wait!r:.80}")
    return max(0, int(wait))


def next_run(name: str, envelope: Envelope) -> bytes:
    """The job as it waits in the delayed set for its next run."""
    return encode_member(name.encode(), encode_envelope(envelope.with_attempt(envelope.attempt + 1)))
