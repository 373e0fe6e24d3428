"""What happens inside, for those who measure: six hooks, and sinks that receive them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger("chasqui.metrics")


@dataclass(frozen=True, slots=True)
class PromoterTick:
    """One pass of the leading promoter. ``oldest_pending_lag_ms``: how overdue the oldest job left behind is."""

    promoted: int
    depth: int
    oldest_pending_lag_ms: int


@dataclass(frozen=True, slots=True)
class LockOutcome:
    """A change of leadership, seen by one candidate: ``acquired``, or ``held`` by another. ``role`` tells of what."""

    outcome: Literal["acquired", "held"]
    role: Literal["promoter", "scheduler"]


@dataclass(frozen=True, slots=True)
class ReaderBatch:
    """One read that brought something; ``reclaimed`` of its entries were taken over from another delivery."""

    size: int
    reclaimed: int


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """One run of a handler. ``attempt`` is the run's number, from 1."""

    kind: Literal["ok", "err", "panic"]
    attempt: int
    handler_duration_us: int
    name: str


@dataclass(frozen=True, slots=True)
class RetryScheduled:
    """A failed job went back to the delayed set; ``attempt`` is the number of the run to come."""

    attempt: int
    backoff_ms: int
    name: str


@dataclass(frozen=True, slots=True)
class DlqRouted:
    """A job went to the dead letters."""

    reason: str
    attempt: int
    name: str
