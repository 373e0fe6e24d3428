"""Partitions without reading: fair shares, packing, and cuts found by guessing, for four shapes of stream."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from itertools import pairwise

import pytest

from chasqui.bridge import Sample, id_parts
from chasqui_spark.planning import (
    PROBES_PER_PARTITION,
    Id,
    Range,
    cut,
    cuts_by_guessing,
    cuts_of_walk,
    fair_order,
    packed,
    partitions_wanted,
    parts_of,
    share,
)

DAY = 86_400_000
START = 1_794_000_000_000


def look(ids: list[Id], guess: Id) -> Sample:
    """What the server's script answers: the nearest entries, and a window of 24, or all of one millisecond."""
    here = bisect_left(ids, guess)

    def side(near: int, step: int) -> tuple[Id | None, Id | None, int]:
        if not 0 <= near < len(ids):
            return None, None, 0
        far = min(max(near + 23 * step, 0), len(ids) - 1)
        if ids[far][0] != ids[near][0]:
            return ids[near], ids[far], abs(far - near)
        while 0 <= far + step < len(ids) and ids[far + step][0] == ids[near][0]:
            far += step
        beyond = far + step if 0 <= far + step < len(ids) else far
        return ids[near], ids[beyond], abs(ids[far][1] - ids[near][1]) + 1

    return Sample(*side(here - 1, -1), *side(here, 1))


def sizes(ids: list[Id], parts: int) -> tuple[list[int], int]:
    """How many entries each partition has, and how many probes it took to cut."""
    upto = f"{ids[-1][0]}-{ids[-1][1]}"
    guessing = cuts_by_guessing("0-0", upto, parts)
    probes = 0
    try:
        guesses = next(guessing)
        while True:
            probes += len(guesses)
            guesses = guessing.send([look(ids, guess) for guess in guesses])
    except StopIteration as stop:
        ends = [bisect_right(ids, id_parts(r.upto)) for r in cut("q", "0-0", upto, stop.value, 1)]
    return [b - a for a, b in pairwise([0, *ends])], probes


SHAPES: dict[str, list[Id]] = {
    "uniform": [(START + i * 864, 0) for i in range(100_000)],
    "at random": sorted({(START + random.Random(i).randrange(DAY), 0) for i in range(20_000)}),
    "ten bursts in a day": [(START + b * DAY // 10 + j // 20, j % 20) for b in range(10) for j in range(10_000)],
    "ten bursts of growing size": [
        (START + b * DAY // 10 + j // (b + 1), j % (b + 1)) for b in range(10) for j in range(2000 * (b + 1))
    ],
    "a million in two seconds": [(START + j // 500, j % 500) for j in range(1_000_000)],
    "a burst inside one millisecond": [(START, j) for j in range(100_000)],
    "three milliseconds": [(START + j // 40_000, j % 40_000) for j in range(120_000)],
}


@pytest.mark.parametrize("parts", [2, 8, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_partition_is_at_most_twice_the_mean(shape: str, parts: int) -> None:
    ids = SHAPES[shape]

    found, probes = sizes(ids, parts)

    assert sum(found) == len(ids)
    assert len(found) == parts
    assert max(found) <= 2 * len(ids) / parts
    assert probes <= PROBES_PER_PARTITION * parts


def test_an_empty_range_and_one_part_need_no_cuts() -> None:
    assert sizes([(5, 0)], 1) == ([1], 0)
    guessing = cuts_by_guessing("0-0", "9-0", 4)
    next(guessing)
    with pytest.raises(StopIteration) as stop:
        guessing.send([Sample(None, None, 0, None, None, 0)] * 2)
    assert stop.value.value == []


def test_a_range_is_cut_without_gap_or_overlap_whatever_the_cuts() -> None:
    ranges = cut("q", "3-0", "9-0", ["2-0", "3-0", "5-0", "9-0", "12-0"], 10)

    assert [(r.after, r.upto) for r in ranges] == [("3-0", "5-0"), ("5-0", "9-0")]


def test_few_entries_are_one_partition_unless_asked_otherwise() -> None:
    assert partitions_wanted(100, None, 8) == 1
    assert partitions_wanted(1_000_000, None, 8) == 8
    assert partitions_wanted(100, 4, 8) == 4


def test_a_hot_queue_gets_most_of_the_pieces() -> None:
    assert parts_of({"hot": 900, "cold": 100, "idle": 0}, 10) == {"hot": 9, "cold": 1, "idle": 1}


def test_small_ranges_share_a_task() -> None:
    ranges = [Range(f"q{i}", "0-0", "9-0", 10) for i in range(100)]

    assert [len(p.ranges) for p in packed(ranges, 4)] == [25, 25, 25, 25]


def test_a_walk_is_cut_at_its_marks() -> None:
    marks = [f"{i * 10}-0" for i in range(1, 11)]

    assert cuts_of_walk(marks, 10, 105, None) == marks
    assert cuts_of_walk(marks, 10, 100, 4) == ["20-0", "50-0", "80-0"]
    assert cuts_of_walk(marks, 10, 100, 1) == []


def test_what_small_queues_leave_goes_to_the_large_ones() -> None:
    waiting = {"huge": 10_000, "tiny": 1, "small": 30}
    left, got = 500, {}
    order = fair_order(waiting, 0)
    for queues_left, queue in zip(range(len(order), 0, -1), order, strict=True):
        got[queue] = min(waiting[queue], share(left, queues_left))
        left -= got[queue]

    assert got == {"tiny": 1, "small": 30, "huge": 469}


def test_a_limit_below_the_number_of_queues_serves_all_of_them_in_turn() -> None:
    first = [fair_order({"a": 5, "b": 5, "c": 5}, turn)[0] for turn in range(6)]

    assert first == ["a", "b", "c", "a", "b", "c"]
