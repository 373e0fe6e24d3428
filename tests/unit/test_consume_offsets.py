"""Offsets of mode=consume, and how a batch is cut into partitions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chasqui import DecodeError
from chasqui_spark.consume_offsets import ConsumeOffset, batches, is_ours, parse
from chasqui_spark.consume_reader import cut

SID = "0123456789abcdef"


def test_the_same_offset_is_always_the_same_text() -> None:
    one = ConsumeOffset(SID, {"b": 2, "a": 1})
    other = parse(json.loads(json.dumps(one.json())))

    assert json.dumps(one.json()) == json.dumps(other.json())
    assert json.dumps(ConsumeOffset().json()) == '{"seq": {}, "sid": null, "v": 1}'


def test_batches_are_those_whose_number_changed() -> None:
    start, end = ConsumeOffset(SID, {"a": 1, "b": 4}), ConsumeOffset(SID, {"a": 2, "b": 4, "c": 1})

    assert batches(start, end) == [("a", 2), ("c", 1)]
    assert batches(ConsumeOffset(), end) == [("a", 2), ("b", 4), ("c", 1)]
    with pytest.raises(DecodeError, match="two queries"):
        batches(start, ConsumeOffset("f" * 16, {}))


@pytest.mark.parametrize(
    "offset",
    [
        {},
        [],
        None,
        {"v": 1, "sid": "../x", "seq": {}},
        {"v": 1, "sid": 3, "seq": {}},
        {"v": 1, "sid": SID, "seq": {"a{b}": 1}},
        {"v": 1, "sid": SID, "seq": {"a": "x"}},
        {"v": 1, "sid": SID, "seq": [1]},
    ],
)
def test_what_is_no_offset_is_refused_with_what_to_do(offset: Any) -> None:
    with pytest.raises(DecodeError, match="checkpointLocation"):
        parse(offset)


def test_an_offset_of_a_newer_release_is_refused_by_its_version() -> None:
    with pytest.raises(DecodeError, match="version 2"):
        parse({"v": 2, "sid": SID, "seq": {}})


@pytest.mark.parametrize("text", [None, "", "null", "[]", "{", '{"v":1,"queues":{}}'])
def test_the_listener_passes_over_offsets_that_are_not_ours(text: str | None) -> None:
    assert is_ours(text) is None


def test_the_listener_knows_our_offsets() -> None:
    for offset in (ConsumeOffset(), ConsumeOffset(SID, {"a": 1})):
        assert is_ours(json.dumps(offset.json())) == offset


@pytest.mark.parametrize(("sizes", "each"), [((1000, 1000, 7), 700), ((3,), 1), ((), 5), ((5, 0, 5), 4), ((9, 9), 100)])
def test_parts_hold_every_job_once_and_no_more_than_asked_for(sizes: tuple[int, ...], each: int) -> None:
    parts = cut(sizes, each)

    held = [(block, i) for part in parts for block, start, stop in part for i in range(start, stop)]
    assert held == [(block, i) for block, size in enumerate(sizes, 1) for i in range(size)]
    lengths = [sum(stop - start for _, start, stop in part) for part in parts]
    assert all(length == each for length in lengths[:-1])
    assert all(0 < length <= each for length in lengths)
