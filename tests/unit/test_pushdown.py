"""Filters -> a narrower range of ids: never one that leaves out a row which passes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, IsNotNull, LessThan

from chasqui.bridge import Position
from chasqui_spark.pushdown import Narrowed, narrowed

MODERN = Position("1795000000009-0", 9, "1795000000001-0", 9, "0-0", exists=True)
OLD = Position("9-0", 9, "1-0", 9, "0-0", exists=True)
MAX = 18446744073709551615


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def bounds(position: Position, *filters: Filter) -> tuple[str, str]:
    return narrowed(filters).bounds("0-0", position.last_id, position)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], ("0-0", "9-0")),
        ([GreaterThanOrEqual(("enqueued_at",), at(4))], (f"3-{MAX}", "9-0")),
        ([GreaterThan(("enqueued_at",), at(4))], (f"3-{MAX}", "9-0")),
        ([LessThan(("enqueued_at",), at(4))], ("0-0", f"4-{MAX}")),
        ([EqualTo(("enqueued_at",), at(4))], (f"3-{MAX}", f"4-{MAX}")),
        ([EqualTo(("created_at",), at(4))], ("0-0", "9-0")),
        ([EqualTo(("enqueued_at",), at(4).replace(tzinfo=None))], ("0-0", "9-0")),
        ([EqualTo(("entry_id",), "4-0")], ("0-0", "9-0")),
        ([IsNotNull(("enqueued_at",))], ("0-0", "9-0")),
    ],
)
def test_times_narrow_a_range(filters: list[Filter], expected: tuple[str, str]) -> None:
    assert bounds(OLD, *filters) == expected


def test_ids_narrow_a_range_to_their_milliseconds() -> None:
    exact = EqualTo(("entry_id",), "1795000000004-7")
    several = In(("entry_id",), ("1795000000004-7", "1795000000002-0"))

    assert bounds(MODERN, exact) == (f"1795000000003-{MAX}", f"1795000000004-{MAX}")
    assert bounds(MODERN, several) == (f"1795000000001-{MAX}", f"1795000000004-{MAX}")
    assert bounds(MODERN, GreaterThan(("entry_id",), "1795000000004-7")) == (f"1795000000003-{MAX}", MODERN.last_id)
    assert bounds(MODERN, GreaterThan(("entry_id",), "5")) == ("0-0", MODERN.last_id)


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([EqualTo(("queue",), "a")], {"a"}),
        ([In(("queue",), ("a", "b")), EqualTo(("queue",), "b")], {"b"}),
        ([GreaterThan(("queue",), "a")], {"a", "b", "c"}),
        ([EqualTo(("payload", "queue"), "a")], {"a", "b", "c"}),
    ],
)
def test_queues_are_chosen(filters: list[Any], wanted: set[str]) -> None:
    found: Narrowed = narrowed(filters)

    assert {queue for queue in "abc" if found.wants(queue)} == wanted
