"""Filters of a batch read -> a narrower range of ids. Pure. What is not understood narrows nothing.

``queue`` and ``enqueued_at`` say exactly where rows can stand. ``entry_id`` is text to Spark and compared as such, by
which 1-10 comes before 1-9: only its milliseconds are used, and only while all of a stream have thirteen digits.
``created_at`` is the producer's clock and says nothing about ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from chasqui.bridge import Position, id_parts, id_text, predecessor

_SEQUENCES = 2**64 - 1
_MODERN = re.compile(r"(\d{13})-\d{1,20}", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What filters leave: these queues (None: all), and milliseconds from and to, both included, by time and by id."""

    queues: frozenset[str] | None = None
    time_from: int | None = None
    time_to: int | None = None
    id_from: int | None = None
    id_to: int | None = None

    def wants(self, queue: str) -> bool:
        return self.queues is None or queue in self.queues

    def bounds(self, begin: str, end: str, position: Position) -> tuple[str, str]:
        """The part of the range behind ``begin`` and up to ``end`` in which rows can stand."""
        lows, highs = [self.time_from], [self.time_to]
        edges = (position.first_id or "", position.last_id)
        if all(_MODERN.fullmatch(edge) for edge in edges):
            lows.append(self.id_from)
            highs.append(self.id_to)
        low = max((ms for ms in lows if ms is not None), default=None)
        high = min((ms for ms in highs if ms is not None), default=None)
        if low is not None:
            begin = id_text(max(id_parts(begin), predecessor((max(0, low), 0))))
        if high is not None:
            end = id_text(min(id_parts(end), (high, _SEQUENCES) if high >= 0 else (0, 0)))
        return begin, end


def narrowed(filters: Sequence[Filter]) -> Narrowed:
    """What all of these filters together leave; Spark joins them with AND."""
    queues: frozenset[str] | None = None
    times: list[tuple[int | None, int | None]] = []
    ids: list[tuple[int | None, int | None]] = []
    for one in filters:
        column = ".".join(getattr(one, "attribute", ()))
        if column == "queue":
            values = _equals(one)
            if values is not None:
                found = frozenset(str(value) for value in values)
                queues = found if queues is None else queues & found
        elif column == "enqueued_at":
            times.append(_span(one, _ms))
        elif column == "entry_id":
            ids.append(_span(one, _id_ms))
    return Narrowed(queues, *_meet(times), *_meet(ids))


def _equals(one: Filter) -> Sequence[Any] | None:
    if isinstance(one, EqualTo | EqualNullSafe):
        return [one.value]
    return list(one.value) if isinstance(one, In) else None


def _span(one: Filter, ms_of: Any) -> tuple[int | None, int | None]:
    """Lowest and highest millisecond that can pass; None: no bound on that side, or none that is understood."""
    values = _equals(one)
    if values is not None:
        found = [ms_of(value) for value in values if value is not None]
        return (None, None) if not found or None in found else (min(found), max(found))
    if isinstance(one, GreaterThan | GreaterThanOrEqual):
        return ms_of(one.value), None
    if isinstance(one, LessThan | LessThanOrEqual):
        return None, ms_of(one.value)
    return None, None


def _ms(value: Any) -> int | None:
    """The millisecond of a time. Spark hands over moments; one without a zone is not a moment, and not used."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    since = value - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000


def _id_ms(value: Any) -> int | None:
    match = _MODERN.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else None


def _meet(spans: Sequence[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    lows = [low for low, _ in spans if low is not None]
    highs = [high for _, high in spans if high is not None]
    return max(lows, default=None), min(highs, default=None)
