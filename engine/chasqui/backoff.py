"""How long to wait before a retry: pure arithmetic, jitter is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chasqui.job import U64_MAX, Backoff


@dataclass(frozen=True, slots=True)
class RetryDefaults:
    """The queue-wide retry curve, for jobs that bring none, and for what their override leaves open."""

    initial_backoff_ms: int = 100
    max_backoff_ms: int = 30_000
    multiplier: float = 2.0
    jitter_ms: int = 100


def backoff_bounds_ms(spec: Backoff | None, defaults: RetryDefaults, n: int) -> tuple[int, int]:
    """The wait after the n-th failed run (from 1): its fixed part, and the span of the jitter that is added to it.

    Jitter comes on top of the cap. Arithmetic is float64, truncated toward zero; what is not a number, or too large
    for one, becomes the cap.
    """
    if spec is None:
        spec = Backoff.exponential(defaults.initial_backoff_ms)
    cap = defaults.max_backoff_ms if spec.max_delay_ms is None else spec.max_delay_ms
    jitter = defaults.jitter_ms if spec.jitter_ms is None else spec.jitter_ms
    base = float(spec.delay_ms)
    if spec.kind != "fixed":
        multiplier = defaults.multiplier if spec.multiplier is None else spec.multiplier
        base *= _power(multiplier, n - 1)
    if math.isnan(base) or base >= cap:
        return cap, jitter
    return int(max(0.0, base)), jitter


def backoff_ms(spec: Backoff | None, defaults: RetryDefaults, n: int, jitter: float) -> int:
    """The wait after the n-th failed run; ``jitter`` is a random number in [0, 1)."""
    base, span = backoff_bounds_ms(spec, defaults, n)
    return min(U64_MAX, base + int(jitter * span))


def _power(x: float, n: int) -> float:
    """x to the n by repeated squaring, n as a signed 32-bit number: the last bits of the result, and what becomes of
    absurd numbers of runs, are then those of every other worker.
    """
    n = (n + 2**31) % 2**32 - 2**31
    result, left = 1.0, abs(n)
    while left:
        if left & 1:
            result *= x
        left >>= 1
        x *= x
    if n >= 0:
        return result
    return 1 / result if result else math.copysign(math.inf, result)
