"""Adding and cancelling, driven by hand: which steps a flow takes for which answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chasqui.errors import BulkInterrupted, ChasquiError, ConnectionLost, QueueFull
from chasqui.protocol import events, produce
from chasqui.protocol.bulk import Bulk
from chasqui.protocol.flow import Batch, Command, Fed, Feed, Flow, Pause, Refusal, Step, call_script, call_scripts
from chasqui.protocol.keys import Keys
from chasqui.protocol.produce import PASSING, Room, UniqueJob, marker_ttl_s
from chasqui.protocol.scripts import SCRIPT_BYTES, script
from tests.support import drive

KEYS = Keys("q")
REJECT = Room(cap=900, trim=0, block_ms=0)
ENDLESS = Room(cap=0, trim=0, block_ms=0)
NOSCRIPT = Refusal("NOSCRIPT", "No matching script.")
OOM = Refusal("OOM", "command not allowed")
LOADING = Refusal("LOADING", "in progress")
LOST = ConnectionLost("gone", sent=True)
UNREACHABLE = ConnectionLost("no way", sent=False)
ADD_JOB, CANCEL = script("add_job"), script("cancel_delayed")


def play(flow: Flow[Any], answer: Callable[[Step], Any]) -> tuple[Any, list[Step]]:
    """Run a flow against a server that is a function. Returns the result, or the error it ends with, and the steps."""
    steps: list[Step] = []
    try:
        step = next(flow)
        while True:
            steps.append(step)
            reply = answer(step)
            step = flow.throw(reply) if isinstance(reply, Exception) else flow.send(reply)
    except StopIteration as stop:
        return stop.value, steps
    except (ChasquiError, Refusal) as error:
        return error, steps


def replay(flow: Flow[Any], replies: list[Any]) -> tuple[Any, list[Step]]:
    """The same with a list of answers, of which a pause takes none."""
    left = iter(replies)
    return play(flow, lambda step: None if isinstance(step, Pause) else next(left))


def pauses(steps: list[Step]) -> list[int]:
    return [step.ms for step in steps if isinstance(step, Pause)]


# --- Scripts -------------------------------------------------------------------------------------------------------


def test_script_is_called_by_its_hash() -> None:
    result, steps = drive(call_script(ADD_JOB, ["k1", "k2"], [5, b"a"]), [7])

    assert result == 7
    assert steps == [Command(("EVALSHA", ADD_JOB.sha, 2, "k1", "k2", 5, b"a"))]


@pytest.mark.parametrize("safe", [False, True])
def test_script_that_the_server_lacks_is_sent_along(safe: bool) -> None:
    result, steps = drive(call_script(ADD_JOB, ["k"], ["a"], safe=safe), [NOSCRIPT, 7])

    assert result == 7
    assert steps == [
        Command(("EVALSHA", ADD_JOB.sha, 1, "k", "a"), safe),
        Command(("EVAL", ADD_JOB.source, 1, "k", "a"), safe),
    ]


def test_other_refusals_of_a_script_are_raised() -> None:
    with pytest.raises(Refusal) as caught:
        drive(call_script(ADD_JOB, ["k"], []), [OOM])

    assert caught.value is OOM


def test_only_the_calls_refused_for_noscript_are_sent_again() -> None:
    scripts = [CANCEL, CANCEL, ADD_JOB, ADD_JOB]
    calls: list[Any] = [(script, [f"k{i}"], [f"a{i}"]) for i, script in enumerate(scripts)]

    result, steps = drive(call_scripts(calls), [[1, NOSCRIPT, OOM, NOSCRIPT], [2, 4]])

    assert result == [1, 2, OOM, 4]
    assert steps[0] == Batch(
        tuple(Command(("EVALSHA", script.sha, 1, f"k{i}", f"a{i}")) for i, script in enumerate(scripts))
    )
    assert steps[1] == Batch(
        (Command(("EVAL", CANCEL.source, 1, "k1", "a1")), Command(("EVAL", ADD_JOB.source, 1, "k3", "a3")))
    )


def test_calls_that_all_succeed_take_one_round_trip() -> None:
    result, steps = drive(call_scripts([(CANCEL, ["k1"], []), (CANCEL, ["k2"], [])]), [[1, 0]])

    assert (result, len(steps)) == ([1, 0], 1)


# --- Room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cap", "refused_at"), [(1_000_000, 900_000), (10, 9), (15, 13), (2, 1), (1, 1)])
def test_refusing_starts_at_nine_tenths_of_the_cap(cap: int, refused_at: int) -> None:
    assert Room.of(cap, "reject", 30_000) == Room(cap=refused_at, trim=0, block_ms=0)


def test_block_refuses_at_nine_tenths_too_after_its_time() -> None:
    assert Room.of(1000, "block", 30_000) == Room(cap=900, trim=0, block_ms=30_000)


def test_trim_never_refuses_and_trims_at_the_cap_itself() -> None:
    assert Room.of(1000, "trim", 30_000) == Room(cap=0, trim=1000, block_ms=0)


def unique(count: int, *, size: int = 1) -> list[UniqueJob]:
    return [UniqueJob(f"id-{i}", b"e" * size, b"n", 60, None) for i in range(count)]


def bulk_of(count: int, *, delayed: bool = False) -> Bulk:
    return Bulk(
        target=KEYS.delayed if delayed else KEYS.stream,
        created_at_ms=1_794_978_620_538,
        ids=[f"{i:026d}" for i in range(count)],
        payloads=[b"\x01"] * count,
        names=[b""] * count,
        retries=[b""] * count,
        run_at_ms=[1_794_978_999_999] * count if delayed else None,
        trim=0,
    )


def full(step: Step) -> Any:
    """A server whose stream is full for ever: scripts say -1, XLEN says so."""
    return None if isinstance(step, Pause) else 900 if step.args[0] == "XLEN" else -1  # type: ignore[union-attr]


ADDS: dict[str, Callable[[Room], Flow[Any]]] = {
    "add": lambda room: produce.add(KEYS, room, b"e", b"n"),
    "add_unique": lambda room: produce.add_unique(KEYS, room, unique(1)),
    "add_bulk": lambda room: produce.add_bulk(KEYS, room, bulk_of(3), attempts=5),
}
each_add = pytest.mark.parametrize("call", ADDS.values(), ids=ADDS)


@each_add
def test_full_queue_is_refused_at_once(call: Callable[[Room], Flow[Any]]) -> None:
    error, steps = play(call(REJECT), full)

    assert isinstance(error, QueueFull)
    assert "queue 'q' holds 900 jobs or more; nothing was added" in error.message
    assert len(steps) == 1


@each_add
@pytest.mark.parametrize("block_ms", [1, 10, 25, 999, 30_000])
def test_block_waits_just_its_time_and_then_refuses(call: Callable[[Room], Flow[Any]], block_ms: int) -> None:
    error, steps = play(call(Room(900, 0, block_ms)), full)

    assert isinstance(error, QueueFull)
    assert f"after {block_ms} ms of waiting" in error.message
    assert sum(pauses(steps)) == block_ms
    assert max(pauses(steps)) <= 500
    assert not isinstance(steps[-1], Pause)


@each_add
def test_block_goes_on_as_soon_as_there_is_room(call: Callable[[Room], Flow[Any]]) -> None:
    asked = 0

    def room_at_the_third_look(step: Step) -> Any:
        nonlocal asked
        if isinstance(step, Feed):
            return Fed([None] * 3, 3)
        if isinstance(step, Command):
            asked += 1
        answer = full(step)
        return answer if asked < 3 or answer is None else 0 if step.args[0] == "XLEN" else [1]  # type: ignore[union-attr]

    error, steps = play(call(Room(900, 0, 30_000)), room_at_the_third_look)

    assert not isinstance(error, Exception)
    assert len(pauses(steps)) == 2


# --- One job, and jobs with ids ------------------------------------------------------------------------------------


def test_add_is_one_script_call_that_must_not_be_repeated() -> None:
    _, steps = drive(produce.add(KEYS, Room(900, 7, 0), b"envelope", b"name"), [1])

    assert steps == [Command(("EVALSHA", ADD_JOB.sha, 1, KEYS.stream, 900, 7, b"envelope", b"name"), safe=False)]


@pytest.mark.parametrize(("wait", "safe"), [(0, False), (59_999, False), (60_000, True)])
def test_delayed_add_is_one_zadd_that_may_be_repeated_while_it_cannot_be_due(wait: int, safe: bool) -> None:
    _, steps = drive(produce.add_delayed(KEYS, 1234 + wait, b"member", 1234), [1])

    assert steps == [Command(("ZADD", KEYS.delayed, 1234 + wait, b"member"), safe=safe)]


def test_unique_add_passes_marker_and_index_of_each_job() -> None:
    jobs = [UniqueJob("a", b"envelope", b"n", 60, None), UniqueJob("b", b"member", b"", 3601, 1234)]

    added, steps = drive(produce.add_unique(KEYS, Room(900, 7, 0), jobs), [[1, b"0"]])

    markers = [KEYS.dedup("a"), KEYS.delayed_index("a"), KEYS.dedup("b"), KEYS.delayed_index("b")]
    assert added == [True, False]
    assert steps == [
        Command(
            (
                "EVALSHA",
                script("add_unique").sha,
                *(6, KEYS.stream, KEYS.delayed, *markers),
                *(900, 7, "", 60, b"envelope", b"n", 1234, 3601, b"member", b""),
            ),
            safe=True,
        )
    ]


def cap_of(step: Step) -> Any:
    assert isinstance(step, Command)
    return step.args[3 + int(step.args[2])]


def test_only_the_first_call_of_many_ids_looks_at_the_cap() -> None:
    added, steps = drive(produce.add_unique(KEYS, REJECT, unique(501)), [[1] * 250, [1] * 250, [0]])

    assert added == [True] * 500 + [False]
    assert [cap_of(step) for step in steps] == [900, 0, 0]


def test_call_of_many_ids_stays_below_the_size_for_scripts() -> None:
    _, steps = replay(produce.add_unique(KEYS, REJECT, unique(3, size=SCRIPT_BYTES // 2)), [[1, 1], [1]])

    assert len(steps) == 2


def test_lost_first_call_of_ids_is_a_lost_connection() -> None:
    error, _ = replay(produce.add_unique(KEYS, REJECT, unique(300)), [LOST])

    assert error is LOST


def test_lost_later_call_of_ids_says_what_is_added_and_what_may_be() -> None:
    error, _ = replay(produce.add_unique(KEYS, REJECT, unique(300)), [[1] * 250, LOST])

    assert isinstance(error, BulkInterrupted)
    assert (error.acknowledged, error.unknown, len(error.ids)) == (250, 50, 300)
    assert error.added == [f"id-{i}" for i in range(250)]
    assert error.__cause__ is LOST


def test_refused_later_call_of_ids_leaves_nothing_unknown() -> None:
    error, _ = replay(produce.add_unique(KEYS, REJECT, unique(300)), [[1] * 250, OOM])

    assert isinstance(error, BulkInterrupted)
    assert (error.acknowledged, error.unknown) == (250, 0)


# --- Bulks ---------------------------------------------------------------------------------------------------------


def fed_from(step: Step) -> int:
    """At which job a feed starts: the number in the first id of its bytes."""
    assert isinstance(step, Feed)
    data = next(iter(step.pieces()))[0]
    at = data.index(b"\xba") + 1
    return int(data[at : at + 26])


def feeds(steps: list[Step]) -> list[int]:
    return [fed_from(step) for step in steps if isinstance(step, Feed)]


def test_bulk_looks_at_the_length_and_feeds() -> None:
    _, steps = drive(produce.add_bulk(KEYS, REJECT, bulk_of(3), 5), [899, Fed([None] * 3, 3)])

    assert steps[0] == Command(("XLEN", KEYS.stream), safe=True)
    assert feeds(steps) == [0]


def test_trimming_bulk_does_not_look_at_the_length() -> None:
    _, steps = drive(produce.add_bulk(KEYS, Room(0, 1000, 0), bulk_of(3), 5), [Fed([None] * 3, 3)])

    assert len(steps) == 1


def test_delayed_bulk_does_not_look_at_the_length() -> None:
    _, steps = drive(produce.add_bulk(KEYS, REJECT, bulk_of(3, delayed=True), 5), [Fed([None] * 3, 3)])

    assert len(steps) == 1


@pytest.mark.parametrize("code", sorted(PASSING))
def test_refusal_that_passes_is_sent_again_from_the_first_refused_job(code: str) -> None:
    refusal = Refusal(code, "for now")

    result, steps = replay(
        produce.add_bulk(KEYS, ENDLESS, bulk_of(4), 5), [Fed([None, refusal, refusal, refusal], 4), Fed([None] * 3, 3)]
    )

    assert result is None
    assert feeds(steps) == [0, 1]
    assert steps[1] == Pause(attempt=0)


def test_passing_refusals_end_after_all_attempts() -> None:
    error, steps = replay(produce.add_bulk(KEYS, ENDLESS, bulk_of(2), 2), [Fed([LOADING, LOADING], 2)] * 3)

    assert error is LOADING
    assert [step for step in steps if isinstance(step, Pause)] == [Pause(attempt=0), Pause(attempt=1)]


def test_progress_gives_the_attempts_back() -> None:
    step_by_step = [Fed([LOADING] * 4, 4), Fed([None, *[LOADING] * 3], 4), Fed([LOADING] * 3, 3), Fed([None] * 3, 3)]

    result, steps = replay(produce.add_bulk(KEYS, ENDLESS, bulk_of(4), 2), step_by_step)

    assert result is None
    assert [step.attempt for step in steps if isinstance(step, Pause)] == [0, 0, 1]


def test_refusal_of_the_first_job_is_raised_as_it_is() -> None:
    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk_of(3), 5), [Fed([OOM, OOM, OOM], 3)])

    assert error is OOM


def test_refusal_half_way_says_what_is_added() -> None:
    bulk = bulk_of(5)

    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 5), [Fed([None, None, OOM, OOM, OOM], 5)])

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown, error.ids) == (bulk.ids[:2], 0, bulk.ids)
    assert error.__cause__ is OOM


@pytest.mark.parametrize("refusal", [OOM, LOADING], ids=["for good", "passing"])
def test_jobs_that_got_in_behind_a_refused_one_are_named(refusal: Refusal) -> None:
    bulk = bulk_of(5)

    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 5), [Fed([None, refusal, None, refusal, None], 5)])

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == ([bulk.ids[0], bulk.ids[2], bulk.ids[4]], 0)


def jobs_in(step: Step) -> list[int]:
    """Which jobs a feed holds: the numbers in their ids."""
    assert isinstance(step, Feed)
    data = b"".join(piece for piece, _ in step.pieces())
    return [int(rest[:26]) for rest in data.split(b"\xba")[1:]]


@pytest.mark.parametrize("delayed", [False, True])
def test_jobs_that_a_node_refused_before_the_queue_was_its_own_are_sent_again_alone(delayed: bool) -> None:
    moved, ask = Refusal("MOVED", "1 h:1"), Refusal("ASK", "1 h:1")
    step_by_step = [Fed([None, moved, None, ask, None], 5), Fed([ask, None, ask], 3), Fed([None, None], 2)]

    result, steps = replay(produce.add_bulk(KEYS, ENDLESS, bulk_of(6, delayed=delayed), 2), step_by_step)

    assert result is None
    assert [jobs_in(step) for step in steps if isinstance(step, Feed)] == [[0, 1, 2, 3, 4, 5], [1, 3, 5], [1, 5]]


def test_jobs_refused_in_a_move_and_then_for_good_are_not_named_as_added() -> None:
    bulk = bulk_of(5)
    moved = Refusal("MOVED", "1 h:1")

    error, _ = replay(
        produce.add_bulk(KEYS, ENDLESS, bulk, 5), [Fed([None, moved, None, moved], 4), Fed([None, OOM, OOM], 3)]
    )

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == ([bulk.ids[0], bulk.ids[1], bulk.ids[2]], 0)
    assert error.__cause__ is OOM


def test_jobs_refused_in_a_move_and_then_lost_may_be_in() -> None:
    bulk = bulk_of(5)
    moved = Refusal("MOVED", "1 h:1")

    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 5), [Fed([moved, None, moved], 3), Fed([None], 3, LOST)])

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == ([bulk.ids[0], bulk.ids[1]], 2)


def test_a_feed_that_its_driver_gave_up_is_not_tried_again() -> None:
    moved = Refusal("MOVED", "1 h:1")

    error, steps = replay(produce.add_bulk(KEYS, ENDLESS, bulk_of(2), 5), [Fed([moved, moved], 2, final=True)])

    assert error is moved
    assert len(steps) == 1


def test_events_refused_in_a_move_are_sent_again_alone() -> None:
    moved = Refusal("MOVED", "1 h:1")
    lines = [(1, b"$1\r\n%d\r\n" % i) for i in range(3)]

    result, steps = replay(events.write(KEYS, lines, 9), [Fed([None, moved, None, moved], 4), Fed([None, None], 2)])

    assert result is None
    sent = [b"".join(piece for piece, _ in step.pieces()) for step in steps if isinstance(step, Feed)]
    assert [[body in data for _, body in lines] for data in sent] == [[True, True, True], [False, True, False]]


@pytest.mark.parametrize("fed", [Fed([OOM, None], 2), Fed([LOADING, LOADING], 2), Fed([None], 2, LOST)])
def test_events_refused_or_lost_otherwise_are_not_sent_again(fed: Fed) -> None:
    error, steps = replay(events.write(KEYS, [(1, b"$1\r\nx\r\n")], 9), [fed])

    assert error in (OOM, LOADING, LOST)
    assert len(steps) == 1


def test_jobs_for_the_stream_are_not_sent_twice_after_a_lost_connection() -> None:
    bulk = bulk_of(9)

    error, steps = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 5), [Fed([None, None], 7, LOST)])

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == (bulk.ids[:2], 5)
    assert error.__cause__ is LOST
    assert feeds(steps) == [0]


def test_jobs_for_the_stream_with_no_answer_at_all_may_be_in() -> None:
    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk_of(9), 5), [Fed([], 9, LOST)])

    assert isinstance(error, BulkInterrupted)
    assert (error.acknowledged, error.unknown) == (0, 9)


def test_jobs_that_never_left_are_sent_again() -> None:
    result, steps = replay(
        produce.add_bulk(KEYS, ENDLESS, bulk_of(2), 5), [Fed([], 0, UNREACHABLE), Fed([None, None], 2)]
    )

    assert result is None
    assert feeds(steps) == [0, 0]


def test_jobs_that_never_left_are_just_a_lost_connection() -> None:
    error, steps = replay(produce.add_bulk(KEYS, ENDLESS, bulk_of(2), 2), [Fed([], 0, UNREACHABLE)] * 3)

    assert error is UNREACHABLE
    assert len(feeds(steps)) == 3


def test_jobs_for_the_stream_unanswered_behind_a_passing_refusal_are_not_sent_twice() -> None:
    bulk = bulk_of(6)

    error, steps = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 5), [Fed([None, LOADING], 6, LOST), Fed([None] * 5, 5)])

    assert feeds(steps) == [0]
    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == (bulk.ids[:1], 4)


def test_delayed_jobs_are_sent_again_from_the_first_unanswered_one() -> None:
    result, steps = replay(
        produce.add_bulk(KEYS, ENDLESS, bulk_of(9, delayed=True), 5),
        [Fed([None] * 4, 9, LOST), Fed([], 5, LOST), Fed([None] * 5, 5)],
    )

    assert result is None
    assert feeds(steps) == [0, 4, 4]


def test_delayed_jobs_that_may_be_due_by_then_are_not_sent_again() -> None:
    bulk = replace(bulk_of(3, delayed=True), run_at_ms=[1_794_978_680_538, 1_794_978_680_537, 1_794_978_680_538])

    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 5), [Fed([None], 3, LOST)])

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == (bulk.ids[:1], 2)


def test_delayed_jobs_with_no_answer_in_the_last_attempt_may_be_in() -> None:
    bulk = bulk_of(9, delayed=True)

    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 0), [Fed([None] * 4, 9, LOST)])

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == (bulk.ids[:4], 5)


def test_delayed_jobs_with_no_answer_in_an_earlier_attempt_may_be_in() -> None:
    bulk = bulk_of(9, delayed=True)

    error, _ = replay(produce.add_bulk(KEYS, ENDLESS, bulk, 1), [Fed([None] * 4, 9, LOST), Fed([], 0, UNREACHABLE)])

    assert isinstance(error, BulkInterrupted)
    assert (error.added, error.unknown) == (bulk.ids[:4], 5)


# --- Cancelling ----------------------------------------------------------------------------------------------------


def test_cancel_calls_its_script_for_each_id_in_one_round_trip() -> None:
    result, steps = drive(produce.cancel_delayed(KEYS, ["a", "b"]), [[1, b"0"]])

    assert result == [True, False]
    assert steps == [
        Batch(
            tuple(
                Command(("EVALSHA", CANCEL.sha, 3, KEYS.delayed, KEYS.delayed_index(i), KEYS.dedup(i)), safe=False)
                for i in "ab"
            )
        )
    ]


def test_cancel_after_noscript_keeps_the_order() -> None:
    result, _ = drive(produce.cancel_delayed(KEYS, ["a", "b", "c"]), [[NOSCRIPT, 1, NOSCRIPT], [0, 1]])

    assert result == [False, True, True]


def test_cancel_raises_a_refusal() -> None:
    error, _ = replay(produce.cancel_delayed(KEYS, ["a", "b"]), [[1, OOM]])

    assert error is OOM


# --- Markers -------------------------------------------------------------------------------------------------------

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "envelope.json").read_text(encoding="utf-8"))["cases"]
MARKED = [(i, case) for i, case in enumerate(GOLDEN) if "dlid_ttl_s" in case]


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case['group']}-{i}") for i, case in MARKED])
def test_marker_lives_as_long_as_the_originals(case: dict[str, Any]) -> None:
    delay_ms = case["score_ms"] - case["created_at_ms"]

    assert marker_ttl_s(delay_ms, 1000) == case["dlid_ttl_s"]


@pytest.mark.parametrize(
    ("delay_ms", "dedup_ttl_ms", "seconds"),
    [
        (0, 1000, 1),
        (0, 1001, 2),
        (0, 86_400_000, 86_400),
        (1, 1000, 3601),
        (1, 86_400_000, 86_400),
        (90_000_000, 86_400_000, 93_600),
    ],
)
def test_marker_lives_for_the_longer_of_dedup_ttl_and_the_originals_time(
    delay_ms: int, dedup_ttl_ms: int, seconds: int
) -> None:
    assert marker_ttl_s(delay_ms, dedup_ttl_ms) == seconds
