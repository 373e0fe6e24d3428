"""Repeatable jobs: what fires, when, and what happens to fires that were missed."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from chasqui import cron
from chasqui.errors import ConfigError
from chasqui.job import U32_MAX, RetryOverride, check_uint


@dataclass(frozen=True, slots=True)
class RepeatPattern:
    """When a repeatable job fires; made by ``cron`` or ``every``.

    ``gap`` and ``overlap`` decide about the days on which clocks change: a fixed time inside the hour that does not
    exist is shifted to its end or skipped; a time inside the hour that comes twice fires in its first pass or in both.
    """

    expression: str | None = None
    tz: str | None = None
    interval_ms: int | None = None
    _: KW_ONLY
    gap: str = "shift"
    overlap: str = "first"

    @classmethod
    def cron(
        cls, expression: str, tz: str | None = None, *, gap: str = "shift", overlap: str = "first"
    ) -> RepeatPattern:
        """A cron expression of 5, 6 (seconds first) or 7 (year last) fields, in UTC or the given zone."""
        return cls(expression, tz, gap=gap, overlap=overlap)

    @classmethod
    def every(cls, interval_ms: int) -> RepeatPattern:
        """A fixed interval; the first fire comes one interval after the spec was added."""
        return cls(interval_ms=interval_ms)

    def __post_init__(self) -> None:
        if (self.expression is None) == (self.interval_ms is None):
            raise ConfigError("a repeat pattern has either a cron expression or an interval: use cron() or every()")
        for name, value in (("expression", self.expression), ("tz", self.tz)):
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} expects text, got {type(value).__name__}")
        if self.interval_ms is not None:
            check_uint("interval_ms", self.interval_ms)
            if self.interval_ms == 0:
                raise ConfigError("interval_ms expects at least 1, got 0")
        if self.gap not in ("shift", "skip"):
            raise ConfigError(f"gap expects shift or skip, got {self.gap!r:.40}")
        if self.overlap not in ("first", "both"):
            raise ConfigError(f"overlap expects first or both, got {self.overlap!r:.40}")

    @property
    def signature(self) -> str:
        """What the default key of a spec is made of."""
        if self.expression is None:
            return f"every:{self.interval_ms}"
        return f"cron:{self.expression}:{'UTC' if self.tz is None else self.tz}"

    def check(self) -> None:
        """Raise CronError if the expression or the zone cannot be understood."""
        if self.expression is not None:
            cron.check(self.expression, self.tz)

    def next_fire_ms(self, after_ms: int) -> int:
        """The first fire later than that moment; NoFutureFire when there is none."""
        if self.expression is None:
            return after_ms + (self.interval_ms or 0)
        return cron.next_fire_ms(self.expression, self.tz, after_ms, gap=self.gap, overlap=self.overlap)


@dataclass(frozen=True, slots=True)
class MissedFires:
    """What to do about windows that passed while no scheduler ran."""

    kind: str = "skip"
    max_catchup: int | None = None

    @classmethod
    def skip(cls) -> MissedFires:
        """Let them go."""
        return cls()

    @classmethod
    def fire_once(cls) -> MissedFires:
        """One fire for all of them."""
        return cls("fire_once")

    @classmethod
    def fire_all(cls, max_catchup: int) -> MissedFires:
        """One fire for each, at most ``max_catchup``."""
        return cls("fire_all", max_catchup)

    def __post_init__(self) -> None:
        if self.kind not in ("skip", "fire_once", "fire_all"):
            raise ConfigError(f"missed_fires expects skip, fire_once or fire_all, got {self.kind!r:.40}")
        if (self.kind == "fire_all") != (self.max_catchup is not None):
            raise ConfigError("max_catchup goes with fire_all, and only with it")
        if self.max_catchup is not None:
            check_uint("max_catchup", self.max_catchup, U32_MAX)
            if self.max_catchup == 0:
                raise ConfigError("max_catchup expects at least 1, got 0")


@dataclass(frozen=True, slots=True)
class RepeatableSpec:
    """A repeatable job. ``limit`` counts fires (0 or None: no limit); the two times bound when it may fire.

    ``retry`` is the override that each fired job carries.
    """

    job_name: str
    pattern: RepeatPattern
    payload: Any
    _: KW_ONLY
    key: str = ""
    limit: int | None = None
    start_after_ms: int | None = None
    end_before_ms: int | None = None
    missed_fires: MissedFires = MissedFires()
    retry: RetryOverride | None = None

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("job_name", self.job_name, str),
            ("pattern", self.pattern, RepeatPattern),
            ("key", self.key, str),
            ("missed_fires", self.missed_fires, MissedFires),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"{name} expects {kind.__name__}, got {type(value).__name__}")
        if self.retry is not None and not isinstance(self.retry, RetryOverride):
            raise ConfigError(f"retry expects a RetryOverride, got {type(self.retry).__name__}")
        for name in ("limit", "start_after_ms", "end_before_ms"):
            check_uint(name, getattr(self, name))

    @property
    def resolved_key(self) -> str:
        """The key it is stored under: its own, else made of name and pattern."""
        return self.key or f"{self.job_name}::{self.pattern.signature}"

    def first_fire_ms(self, now_ms: int) -> int:
        """The first fire after now and after ``start_after_ms``; an error when it would come too late."""
        fire = self.pattern.next_fire_ms(max(now_ms, self.start_after_ms or 0))
        if self.end_before_ms is not None and fire > self.end_before_ms:
            raise ConfigError(f"end_before_ms ({self.end_before_ms}) is before the first fire ({fire})")
        return fire


@dataclass(frozen=True, slots=True)
class RepeatableMeta:
    """A stored spec as ``list_repeatable`` shows it: without its payload."""

    key: str
    job_name: str
    pattern: RepeatPattern
    next_fire_ms: int
    limit: int | None
    start_after_ms: int | None
    end_before_ms: int | None
    missed_fires: MissedFires
    retry: RetryOverride | None = None
