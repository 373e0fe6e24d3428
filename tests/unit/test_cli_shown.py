"""Values as text and JSON: nothing from a server controls a terminal, nothing is lost on the way to JSON."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from chasqui.cli.command import past_ms
from chasqui.cli.shown import age, as_json, count, jsonable, moment, printable, spark_line
from chasqui.cli.watch import rates
from chasqui.errors import ConfigError
from chasqui.job import Overview
from tests.unit.test_doctor import GOOD_QUEUE


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\r", "\x07", "\u202eabc", "\x9b31m", "\ud800"])
def test_no_text_moves_the_cursor(text: str) -> None:
    shown = printable(text)

    assert shown.isprintable()
    assert shown != text


def test_text_is_cut_with_an_ellipsis() -> None:
    assert printable("abcdef", 4) == "abc…"
    assert printable("abcd", 4) == "abcd"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"a": [1, None, True, 1.5, "ü"]}, {"a": [1, None, True, 1.5, "ü"]}),
        (b"\x00\xff", {"$bytes": "AP8="}),
        (float("nan"), {"$float": "nan"}),
        ({1: 2}, {"$map": [[1, 2]]}),
        ({"$bytes": "x"}, {"$map": [["$bytes", "x"]]}),
        (msgpack.ExtType(5, b"x"), {"$ext": 5, "data": "eA=="}),
        (msgpack.Timestamp(1, 2), {"$timestamp": [1, 2]}),
        (2**64, 2**64),
    ],
)
def test_json_keeps_what_messagepack_can_hold(value: Any, shown: Any) -> None:
    assert json.loads(as_json(value)) == shown


def test_deep_nesting_ends() -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]

    assert "$deep" in json.dumps(jsonable(value))


@pytest.mark.parametrize(
    ("ms", "shown"), [(0, "0 ms"), (999, "999 ms"), (1500, "1.5 s"), (61_000, "1m 1s"), (90_061_000, "1d 1h")]
)
def test_age_has_two_units(ms: int, shown: str) -> None:
    assert age(ms) == shown


def test_moment_is_utc_and_never_fails() -> None:
    assert moment(1794978715267) == "2026-11-18T05:11:55.267Z"
    assert moment(2**63) == f"{2**63} ms"


def test_counts_tell_thousands_apart_and_unknown_is_a_dash() -> None:
    assert [count(n) for n in (0, 1234567, 1.25, None)] == ["0", "1,234,567", "1.2", "-"]


def test_spark_line_scales_to_the_highest_and_leaves_gaps() -> None:
    assert spark_line([0, 5, 10, None], 4) == "▁▅█ "
    assert spark_line([1, 2], 4) == "  ▅█"
    assert spark_line([0, 0], 2) == "▁▁"


@pytest.mark.parametrize(
    ("text", "ms"),
    [("15m", 100_000), ("1000s", 0), ("1970-01-01T00:00:05Z", 5000), ("1794978715267", 1794978715267)],
)
def test_times_are_read_as_people_write_them(text: str, ms: int) -> None:
    assert past_ms(text, now_ms=1_000_000) == ms


def test_other_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="15m"):
        past_ms("soon")


def look(**figures: Any) -> Overview:
    import dataclasses

    return dataclasses.replace(GOOD_QUEUE, **figures)


def test_rates_are_what_came_and_went_per_second() -> None:
    before = look(added=100, length=50, dead=1, now_ms=1000)
    now = look(added=160, length=30, dead=3, now_ms=3000)

    found = rates(before, now)

    assert (found.added, found.settled, found.dead) == (30, 40, 1)


@pytest.mark.parametrize("before", [None, look(added=None, now_ms=0), look(added=500, now_ms=0)])
def test_unknown_rates_are_unknown_and_not_zero(before: Overview | None) -> None:
    """No look before, a server that does not count, or a stream that was made anew."""
    assert rates(before, look(added=100, now_ms=1000)).added is None
