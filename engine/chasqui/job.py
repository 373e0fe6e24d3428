"""The values that users hold: jobs, retry overrides, dead letters, figures of a queue."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Any

from chasqui.errors import ConfigError

MAX_NAME_BYTES = 256
MAX_ID_BYTES = 1024
U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1

BACKOFF_KINDS = ("fixed", "exponential", "unknown")


def check_uint(name: str, value: Any, top: int = U64_MAX) -> None:
    """Refuse what is neither None nor a whole number in range."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= top:
        raise ConfigError(f"{name} expects a whole number from 0 to {top}, got {value!r:.80}")


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a retry. What is None is taken from the worker's queue-wide settings.

    ``unknown`` is what a kind from a newer program is read as; it is computed as exponential and cannot be chosen.
    """

    kind: str
    delay_ms: int
    max_delay_ms: int | None = None
    multiplier: float | None = None
    jitter_ms: int | None = None

    @classmethod
    def fixed(cls, delay_ms: int, *, max_delay_ms: int | None = None, jitter_ms: int | None = None) -> Backoff:
        """The same wait before every retry."""
        return cls("fixed", delay_ms, max_delay_ms, None, jitter_ms)

    @classmethod
    def exponential(
        cls,
        delay_ms: int,
        *,
        max_delay_ms: int | None = None,
        multiplier: float | None = None,
        jitter_ms: int | None = None,
    ) -> Backoff:
        """``delay_ms`` before the first retry, ``multiplier`` times more before each later one."""
        return cls("exponential", delay_ms, max_delay_ms, multiplier, jitter_ms)

    def __post_init__(self) -> None:
        if self.kind not in BACKOFF_KINDS:
            raise ConfigError(f"Backoff kind expects fixed or exponential, got {self.kind!r:.80}")
        if self.delay_ms is None:
            raise ConfigError("Backoff delay_ms expects a whole number, got None")
        check_uint("Backoff delay_ms", self.delay_ms)
        check_uint("Backoff max_delay_ms", self.max_delay_ms)
        check_uint("Backoff jitter_ms", self.jitter_ms)
        if self.multiplier is not None:
            if isinstance(self.multiplier, bool) or not isinstance(self.multiplier, int | float):
                raise ConfigError(f"Backoff multiplier expects a number, got {self.multiplier!r:.80}")
            try:
                object.__setattr__(self, "multiplier", float(self.multiplier))
            except OverflowError:
                raise ConfigError("Backoff multiplier expects a number, got one that no float can hold") from None


@dataclass(frozen=True, slots=True)
class RetryOverride:
    """A job's own retry rules. ``max_attempts`` counts all runs; 0 sends the job to the dead letters unrun."""

    max_attempts: int | None = None
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        check_uint("RetryOverride max_attempts", self.max_attempts, U32_MAX)
        if self.backoff is not None and not isinstance(self.backoff, Backoff):
            raise ConfigError(f"RetryOverride backoff expects a Backoff, got {type(self.backoff).__name__}")


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be added. At most one of ``delay_ms`` and ``run_at_ms`` (epoch) says when it may run."""

    payload: Any
    _: KW_ONLY
    id: str | None = None
    name: str = ""
    retry: RetryOverride | None = None
    delay_ms: int | None = None
    run_at_ms: int | None = None


@dataclass(slots=True)
class Job:
    """A job as it stands in the queue. ``attempt`` counts finished failed runs, so the first run sees 0.

    ``payload`` is the decoded value, or MessagePack bytes where ``raw`` was asked for. Not frozen: workers make one
    per job, and a frozen one costs three times as much.
    """

    id: str
    name: str
    payload: Any
    created_at_ms: int
    attempt: int
    retry: RetryOverride | None
    entry_id: str

    @property
    def run(self) -> int:
        """The number of the run that this is, or would be: from 1."""
        return self.attempt + 1

    @property
    def created_at(self) -> datetime:
        """When the job was added, by its producer's clock."""
        return datetime.fromtimestamp(self.created_at_ms / 1000, UTC)


@dataclass(frozen=True, slots=True)
class DlqEntry:
    """A dead letter. ``payload`` holds the envelope's bytes as stored; ``job`` is what they decode to, else None.

    ``error`` is what the handler raised, where the worker that gave up was ours.
    """

    dlq_id: str
    source_id: str
    reason: str
    detail: str | None
    payload: bytes
    name: str
    job: Job | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of a queue at one moment. ``oldest_age_ms`` is that of the oldest job in the stream; 0 when empty."""

    waiting: int
    pending: int
    delayed: int
    dlq: int
    oldest_age_ms: int
    paused: bool


@dataclass(frozen=True, slots=True)
class DelayedJob:
    """A job that waits for its time, or for its retry. ``member`` holds its bytes; ``job`` what they decode to, else
    None.
    """

    run_at_ms: int
    name: str
    job: Job | None
    member: bytes


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker as its group knows it: jobs it holds, and how long it has not been heard of."""

    name: str
    pending: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class Overview:
    """A queue at one moment, by the server's clock (``now_ms``).

    ``length`` counts the jobs in the stream: ``waiting`` and ``pending`` ones. ``next_due_ms`` is when the first
    delayed job may run, ``delayed_lag_ms`` how overdue it is. ``promoter`` and ``scheduler`` name who leads, or are
    None. ``added`` and ``dead`` count all jobs that the stream and the dead letters ever had; None before Redis 7.0.
    """

    queue: str
    group: str
    group_exists: bool
    length: int
    waiting: int
    pending: int
    delayed: int
    dlq: int
    events: int
    repeatable: int
    oldest_age_ms: int
    next_due_ms: int | None
    delayed_lag_ms: int
    paused: bool
    promoter: str | None
    scheduler: str | None
    added: int | None
    dead: int | None
    workers: list[WorkerSeen]
    now_ms: int
