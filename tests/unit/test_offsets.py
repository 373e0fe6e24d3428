"""Offsets of stream queries: their JSON, where to begin, and when entries were lost."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest

from chasqui import ChasquiError, OptionError, WrongKeyType
from chasqui.bridge import Position
from chasqui_spark.offsets import (
    Found,
    Mark,
    Start,
    added_at,
    assess,
    check_start,
    end_of,
    first_look,
    from_json,
    initial,
    lost_since,
    moved,
    resolved,
    start_of,
    to_json,
)
from chasqui_spark.options import SourceOptions, source_options


def options(**given: str) -> SourceOptions:
    return source_options({"queue": "q", "url": "redis://nowhere", **given})


def stands(
    last: str, length: int, *, added: int | None = None, first: str | None = "1-0", deleted: str = "0-0"
) -> Position:
    return Position(last, length, first, length if added is None else added, deleted, exists=True)


# --- JSON ---


def test_the_initial_offset_is_what_was_asked_for() -> None:
    assert json.dumps(initial(start_of(options()))) == '{"start": "earliest", "v": 1}'
    assert json.dumps(initial(start_of(options(startingOffsets="LATEST")))) == '{"start": "latest", "v": 1}'
    assert initial(Start("earliest", {"b": "1-0", "a": "latest"})) == {"start": {"a": "latest", "b": "1-0"}, "v": 1}


def test_queues_are_sorted_and_unknown_figures_left_out() -> None:
    text = json.dumps(to_json({"b": Mark("2-0", 7), "a": Mark("1-0", None, "0-5")}, "jobs"))

    assert text == '{"queues": {"a": {"from": "0-5", "id": "1-0"}, "b": {"added": 7, "id": "2-0"}}, "v": 1}'


def test_an_offset_reads_back_as_it_was_written() -> None:
    marks = {"a": Mark("1-0", 3, "0-5", gone=1), "b": Mark("2-0"), "c": Mark("9-0", ahead=True)}

    assert from_json(to_json(marks, "jobs"), "jobs").marks == marks
    assert from_json(to_json(marks, "dlq"), "dlq").marks == marks
    assert from_json(initial(Start()), "events").symbolic


@pytest.mark.parametrize(("of", "by"), [("jobs", "events"), ("events", "jobs"), ("events", "dlq")])
def test_an_offset_of_another_view_is_refused(of: str, by: str) -> None:
    with pytest.raises(
        ChasquiError, match=f"it is of view '{of}', and this query reads {by}.*another checkpointLocation"
    ):
        from_json(to_json({"q": Mark("1-0")}, of), by)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "no version"),
        ([], "no version"),
        ({"v": 2, "queues": {}}, "its version is 2"),
        ({"v": 1, "sid": "x", "seq": {}}, "mode=consume"),
        ({"v": 1, "queues": {"q": {}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": "x"}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": "1-0", "from": "'"}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": 5}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": 5}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": "18446744073709551616-0"}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": "1-0", "added": -1}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": "1-0", "added": float("inf")}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": "1-0", "added": 2**64}}}, "cannot be read"),
        ({"v": 1, "queues": {"q": {"id": "1-0", "ahead": 1}}}, "cannot be read"),
    ],
)
def test_a_foreign_offset_is_refused_with_a_reason(given: Any, why: str) -> None:
    with pytest.raises(ChasquiError, match=why):
        from_json(given, "jobs")


# --- Where to begin ---


def test_the_entry_that_a_start_names_is_the_first_one_read() -> None:
    assert start_of(options(startingOffsets='{"q": "5-3"}')).of("q") == "5-2"
    assert start_of(options(startingOffsets='{"q": "5"}')).of("q") == "4-18446744073709551615"
    assert start_of(options(startingOffsets='{"q": "0-0"}')).of("q") == "0-0"
    assert start_of(options(startingTimestamp="1794978620538")).of("q") == "1794978620537-18446744073709551615"
    assert start_of(options(startingTimestamp="0")).of("q") == "0-0"
    assert start_of(options(startingTimestamp="1970-01-01T01:00:00.005+01:00")).of("q") == "4-18446744073709551615"


def test_the_entry_that_an_end_names_is_the_last_one_read() -> None:
    assert end_of(options(endingOffsets='{"q": "5-3"}')).of("q") == "5-3"
    assert end_of(options(endingOffsets='{"q": "5"}')).of("q") == "5-18446744073709551615"
    assert end_of(options(endingTimestamp="1970-01-01T00:00:00.005")).of("q") == "4-18446744073709551615"
    assert end_of(options()).of("q") == "latest"


def test_latest_is_where_the_stream_stands() -> None:
    assert resolved("latest", stands("9-0", 1)) == "9-0"
    assert resolved("earliest", stands("9-0", 1)) == "0-0"
    assert resolved("4-4", stands("9-0", 1)) == "4-4"


@pytest.mark.parametrize(
    "given",
    [
        {"startingOffsets": "never"},
        {"startingOffsets": "[]"},
        {"startingOffsets": "{}"},
        {"startingOffsets": '{"q": 5}'},
        {"startingOffsets": '{"q": "99999999999999999999-0"}'},
        {"startingOffsets": '{"q": "-5-0"}'},
        {"startingOffsets": '{"q": 5.5}'},
        {"startingOffsets": '{"q": ["5-0"]}'},
        {"startingOffsets": '{"q": "' + "5" * 100_000 + '"}'},
        {"startingOffsets": '{"r": "5-0"}'},
        {"startingOffsets": "[" * 100_000},
        {"endingOffsets": '{"q": "earliest"}'},
        {"startingTimestamp": ""},
        {"startingTimestamp": "-5"},
        {"startingTimestamp": "1969-12-31T00:00:00Z"},
        {"startingTimestamp": "9" * 16},
        {"endingTimestamp": "12 o'clock"},
    ],
    ids=lambda given: str(given)[:60],
)
def test_a_start_that_cannot_be_read_is_refused_by_its_options_name(given: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=next(iter(given))):
        check_start(options(**given))


def test_a_queue_named_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="startingOffsets names queue 'q' twice"):
        check_start(options(startingOffsets='{"q": "5-0", "q": "6-0"}'))


@pytest.mark.parametrize("option", ["startingTimestamp", "endingTimestamp"])
def test_seconds_where_milliseconds_are_expected_are_refused_with_a_hint(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option} expects epoch milliseconds.* 1794978620000"):
        check_start(options(**{option: "1794978620"}))


def test_a_queue_outside_the_pattern_is_refused() -> None:
    def of(pattern: str) -> SourceOptions:
        given = {"url": "redis://nowhere", "queuePattern": pattern, "startingOffsets": '{"mail-a": "5-0"}'}
        return source_options(given)

    check_start(of("mail-*"))
    odd = {"url": "redis://nowhere", "queuePattern": "mail-*", "startingOffsets": '{"\\ud800": "5-0"}'}
    with pytest.raises(OptionError, match="which is no queue of queuePattern"):
        check_start(source_options(odd))
    check_start(of("mail-[a-c]"))
    with pytest.raises(
        OptionError, match=r"startingOffsets names 'mail-a', which is no queue of queuePattern 'sms-\*'"
    ):
        check_start(of("sms-*"))


def test_a_time_may_lie_in_the_future_but_an_entry_that_a_start_names_was_there() -> None:
    named, timed = start_of(options(startingOffsets='{"q": "9-0"}')), start_of(options(startingOffsets='{"q": "9"}'))

    assert first_look(named, "q", stands("8-0", 1)).lost
    assert first_look(named, "q", stands("8-0", 1)).begin == "8-0"
    assert first_look(named, "q", Position()).lost
    assert first_look(timed, "q", stands("7-0", 1)) == Found("8-18446744073709551615")
    assert first_look(named, "q", stands("9-0", 1)).lost is None
    assert first_look(start_of(options(startingOffsets='{"q": "8-1"}')), "q", stands("8-0", 1)) == Found("8-0")


def test_a_stream_that_has_not_come_to_its_start_lost_nothing() -> None:
    mark = Mark("8-5", ahead=True)

    for position in (Position(), stands("3-0", 2), stands("9-0", 4)):
        assert assess("events", mark, position, may_vanish=False).lost is None
        assert assess("events", mark, position, may_vanish=False).begin == "8-5"


def test_only_a_change_of_place_is_a_batch() -> None:
    assert not moved(Mark("5-0", 3), Mark("5-0", 9))
    assert not moved(None, Mark("0-0"))
    assert moved(None, Mark("1-0"))
    assert moved(Mark("5-0"), Mark("5-0", None, "0-0"))


# --- Data loss ---


@pytest.mark.parametrize("view", ["jobs", "events", "dlq"])
def test_a_stream_that_only_grew_lost_nothing(view: str) -> None:
    assert assess(view, Mark("3-0", 3), stands("9-0", 9), may_vanish=False) == Found("3-0")


def test_trimming_counts_as_loss_where_nobody_deletes() -> None:
    position = stands("9-0", 2, added=9, first="8-0")

    assert assess("events", Mark("3-0", 3), position, may_vanish=False).lost == (
        "4 entries after 3-0 were trimmed before they were read"
    )
    assert assess("jobs", Mark("3-0", 3), position, may_vanish=False) == Found("3-0", gone=4)


def test_deletion_behind_the_offset_makes_trimming_undecidable() -> None:
    assert assess("dlq", Mark("3-0", 3), stands("9-0", 2, added=9, deleted="4-0"), may_vanish=False) == Found("3-0")
    assert assess("dlq", Mark("3-0", 3), stands("9-0", 2, added=9, deleted="2-0"), may_vanish=False).lost


def test_a_stream_that_ends_before_the_offset_goes_on_at_its_end() -> None:
    found = assess("jobs", Mark("9-0", 9), stands("7-0", 7), may_vanish=False)

    assert found.begin == "7-0"
    assert found.lost


@pytest.mark.parametrize(
    "position",
    [
        pytest.param(stands("9-0", 1), id="fewer entries than were read"),
        pytest.param(stands("9-0", 3), id="a higher id with no more entries"),
        pytest.param(stands("9-0", 5, first="4-0"), id="more entries behind the mark than came"),
        pytest.param(stands("9-0", 2, first="1-0"), id="lost its tail, and went on"),
    ],
)
def test_a_stream_that_is_not_the_one_that_was_read_is_a_loss_and_nothing_is_read_twice(position: Position) -> None:
    found = assess("jobs", Mark("3-0", 3), position, may_vanish=False)

    assert found.begin == "3-0"
    assert found.lost


def test_an_unchanged_stream_lost_nothing() -> None:
    assert assess("jobs", Mark("9-0", 3), stands("9-0", 3), may_vanish=False) == Found("9-0")
    assert assess("jobs", Mark("3-0", 3), stands("9-0", 5, first="4-0", added=8), may_vanish=False) == Found("3-0")


def test_a_vanished_stream_is_a_loss_only_where_queues_are_named_and_something_was_read() -> None:
    assert assess("jobs", Mark("3-0"), Position(), may_vanish=False).lost
    assert assess("jobs", Mark("3-0"), Position(), may_vanish=True) == Found("0-0", here=False)
    assert assess("jobs", Mark("0-0"), Position(), may_vanish=False) == Found("0-0", here=False)
    assert assess("jobs", Mark("3-0"), WrongKeyType("x"), may_vanish=True).lost


def test_without_counters_only_ids_tell() -> None:
    position = Position("9-0", 1, "9-0", None, None, exists=True)

    assert assess("events", Mark("3-0", 3), position, may_vanish=False) == Found("3-0")
    assert assess("events", Mark("10-0", 3), position, may_vanish=False).lost


def test_a_batch_that_is_run_again_tells_what_was_trimmed_meanwhile() -> None:
    old, mark = Mark("3-0", 3), Mark("6-0", 6)
    first = Mark("6-0", 6, gone=1)

    assert lost_since("events", old, mark, stands("6-0", 3, added=6, first="4-0"), may_vanish=False) is None
    assert lost_since("events", old, mark, stands("6-0", 2, added=6, first="5-0"), may_vanish=False)
    assert lost_since("jobs", old, mark, stands("6-0", 2, added=6, first="5-0"), may_vanish=False) is None
    assert lost_since("jobs", old, mark, stands("4-0", 4), may_vanish=False)
    assert lost_since("jobs", old, mark, Position(), may_vanish=False)
    assert lost_since("events", None, first, stands("6-0", 5, added=6, first="2-0"), may_vanish=False) is None
    assert lost_since("events", None, first, stands("8-0", 6, added=8, first="3-0"), may_vanish=False)
    assert lost_since("dlq", None, first, stands("8-0", 6, added=8, deleted="3-0"), may_vanish=False) is None


def test_how_many_were_added_is_known_in_the_middle_while_nothing_was_deleted() -> None:
    position = stands("9-0", 7, added=9, first="3-0")

    assert added_at("0-0", None, position, 2) == 4
    assert added_at("5-0", Mark("5-0", 5), position, 2) == 7
    assert added_at("5-0", Mark("5-0"), position, 2) is None
    assert added_at("5-0", Mark("5-0", 5), stands("9-0", 7, added=9, deleted="6-0"), 2) is None
    assert added_at("5-0", None, Position("9-0", 1, "9-0", None, None, exists=True), 2) is None


def test_any_json_in_a_checkpoint_is_an_offset_or_a_typed_error() -> None:
    chance = random.Random(5)
    some: list[Any] = [None, True, -1, 1, 2**70, 1.5, float("inf"), "", "1-0", "5", "x", "\ud800", [], {}]

    def anything(depth: int) -> Any:
        if depth and chance.random() < 0.6:
            keys = chance.sample(["v", "queues", "q", "id", "added", "from", "gone", "ahead", "view", "start"], 3)
            return {key: anything(depth - 1) for key in keys} | ({"v": 1} if chance.random() < 0.5 else {})
        return chance.choice(some)

    for _ in range(20_000):
        with suppress(ChasquiError):
            assert isinstance(from_json(anything(4), "jobs").marks, dict)
