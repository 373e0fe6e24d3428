"""Planning what a due spec fires, and the flows around it, without a server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chasqui.errors import ConfigError, ConnectionLost, CronError, DecodeError, NoFutureFire
from chasqui.job import Backoff, RetryOverride
from chasqui.protocol import schedule
from chasqui.protocol.codec import decode_envelope
from chasqui.protocol.flow import Batch, Command, Refusal
from chasqui.protocol.keys import Keys
from chasqui.protocol.lease import Lease
from chasqui.protocol.produce import Room
from chasqui.protocol.replies import score_ms
from chasqui.protocol.schedule import MAX_STEPS, PASS_JOBS, Plan, checked_key, pass_once, plan_fires
from chasqui.protocol.scripts import script
from chasqui.protocol.specs import StoredSpec, decode_spec, encode_spec, payload_element
from chasqui.repeat import MissedFires, RepeatableSpec, RepeatPattern
from tests.support import drive

NOW = 1_794_978_620_538
KEYS = Keys("q")
LEASE = Lease(KEYS.scheduler_lock, "me", 5000)
ROOM = Room.of(1000, "reject", 0)
SKIP, ONCE = MissedFires.skip(), MissedFires.fire_once()
all_of = MissedFires.fire_all


def a_spec(
    pattern: RepeatPattern | int, missed: MissedFires = SKIP, *, element: bytes = b"\xc0", **fields: Any
) -> StoredSpec:
    given: dict[str, Any] = dict.fromkeys(("limit", "start_after_ms", "end_before_ms", "retry")) | fields
    chosen = RepeatPattern.every(pattern) if isinstance(pattern, int) else pattern
    return StoredSpec(key="k", job_name="job", pattern=chosen, element=element, missed_fires=missed, **given)


def numbered(count: int, now_ms: int) -> list[str]:
    return [f"id-{i}" for i in range(count)]


# --- Plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "fires"),
    [(SKIP, 0), (ONCE, 1), (all_of(100), 6), (all_of(2), 2), (all_of(6), 6)],
    ids=["skip", "fire once", "fire all", "fire two", "fire exactly all"],
)
def test_missed_windows_fire_as_the_policy_says_and_the_rhythm_stays(missed: MissedFires, fires: int) -> None:
    plan = plan_fires(a_spec(1000, missed), NOW - 5500, NOW)

    assert plan == Plan([NOW - 5500 + 1000 * i for i in range(fires)], NOW - 5500 + 6000)


@pytest.mark.parametrize("missed", [SKIP, ONCE, all_of(9)], ids=["skip", "fire once", "fire all"])
@pytest.mark.parametrize("late", [0, 1, 5500, 10_000])
def test_a_single_late_window_fires_under_every_policy(missed: MissedFires, late: int) -> None:
    assert plan_fires(a_spec(10_000, missed), NOW - late, NOW) == Plan([NOW - late], NOW - late + 10_000)


def test_one_more_millisecond_makes_it_two_windows() -> None:
    assert plan_fires(a_spec(10_000), NOW - 10_001, NOW) == Plan([], NOW + 9_999)


def test_an_interval_too_short_for_the_outage_is_set_to_a_minute_from_now() -> None:
    assert plan_fires(a_spec(1), NOW - MAX_STEPS + 1, NOW).next_ms == NOW + 1
    assert plan_fires(a_spec(1), NOW - MAX_STEPS, NOW).next_ms == NOW + 60_000
    assert plan_fires(a_spec(1, ONCE), 0, NOW) == Plan([0], NOW + 60_000)


def test_the_last_match_of_all_fires_and_ends_the_spec() -> None:
    new_year = 1_577_836_800_000
    pattern = RepeatPattern.cron("0 0 0 1 1 * 2020")

    for missed in (SKIP, ONCE, all_of(5)):
        assert plan_fires(a_spec(pattern, missed), new_year, new_year) == Plan([new_year], 0)
        assert plan_fires(a_spec(pattern, missed), new_year, NOW) == Plan([new_year], 0)


@pytest.mark.parametrize(("missed", "fires"), [(SKIP, 0), (ONCE, 1), (all_of(9), 3), (all_of(2), 2)])
def test_a_pattern_that_ended_while_nobody_looked_ends_by_its_policy(missed: MissedFires, fires: int) -> None:
    years = [1_514_764_800_000, 1_546_300_800_000, 1_577_836_800_000]

    plan = plan_fires(a_spec(RepeatPattern.cron("0 0 0 1 1 * 2018-2020"), missed), years[0], NOW)

    assert plan == Plan(years[:fires], 0)


def test_a_next_fire_beyond_the_end_is_none() -> None:
    assert plan_fires(a_spec(500, end_before_ms=NOW + 500), NOW, NOW) == Plan([NOW], NOW + 500)
    assert plan_fires(a_spec(500, end_before_ms=NOW + 499), NOW, NOW) == Plan([NOW], 0)
    assert plan_fires(a_spec(500, end_before_ms=0), NOW, NOW) == Plan([NOW], NOW + 500)
    assert plan_fires(a_spec(500, end_before_ms=NOW - 900), NOW - 2000, NOW) == Plan([], 0)


def test_a_catch_up_does_not_fire_windows_beyond_the_end() -> None:
    plan = plan_fires(a_spec(1000, all_of(100), end_before_ms=NOW - 2500), NOW - 5500, NOW)

    assert plan == Plan([NOW - 5500, NOW - 4500, NOW - 3500, NOW - 2500], 0)


def test_start_after_holds_also_for_the_fires_after_the_first() -> None:
    assert plan_fires(a_spec(1000, start_after_ms=NOW + 7), NOW - 99_000, NOW) == Plan([NOW - 99_000], NOW + 1007)
    assert plan_fires(a_spec(1000, start_after_ms=NOW - 2500), NOW - 99_000, NOW) == Plan([], NOW + 500)


def test_a_long_catch_up_goes_on_where_it_was_cut_and_fires_no_more_than_allowed() -> None:
    spec, at, left = a_spec(1000, all_of(2500)), NOW - 10_000_000, None
    fires: list[int] = []
    sizes = []
    for _ in range(3):
        plan = plan_fires(spec, at, NOW, left=left)
        fires += plan.fires
        sizes.append(len(plan.fires))
        at, left = plan.next_ms, plan.left

    assert sizes == [1000, 1000, 500]
    assert fires == [NOW - 10_000_000 + 1000 * i for i in range(2500)]
    assert (at, left) == (NOW + 1000, 0)


def test_a_catch_up_that_reached_the_present_is_over() -> None:
    spec = a_spec(1000, all_of(50))

    first = plan_fires(spec, NOW - 3500, NOW, most=3)
    second = plan_fires(spec, first.next_ms, NOW, left=first.left, most=3)

    assert first == Plan([NOW - 3500, NOW - 2500, NOW - 1500], NOW - 500, 47)
    assert second == Plan([NOW - 500], NOW + 500)


def test_after_an_outage_a_cron_fires_when_a_walk_from_window_to_window_says() -> None:
    rng = random.Random(7)
    expressions = ["* * * * *", "*/7 3-5 * * *", "30 2 * * *", "0 0 L * *", "*/20 * * * * *", "15 1 * * SUN"]
    for _ in range(150):
        zone = rng.choice([None, "America/New_York", "Europe/London", "+05:30"])
        pattern = RepeatPattern.cron(
            rng.choice(expressions), zone, gap=rng.choice(["shift", "skip"]), overlap=rng.choice(["first", "both"])
        )
        fire_at = pattern.next_fire_ms(rng.randrange(1_800_000_000_000, 1_830_000_000_000))
        now = fire_at + rng.randrange(1, 200 * 60_000)
        walked = fire_at
        while walked <= now:
            walked = pattern.next_fire_ms(walked)

        assert plan_fires(a_spec(pattern, ONCE), fire_at, now).next_ms == walked


# --- Storing -------------------------------------------------------------------------------------------------------


def upsert_step(spec: StoredSpec, first_ms: int) -> Command:
    _, [step] = drive(schedule.upsert(KEYS, spec, first_ms, NOW), [1])
    assert isinstance(step, Command)
    return step


def test_an_upsert_is_sent_again_only_while_nobody_can_have_acted_on_it() -> None:
    assert upsert_step(a_spec(5), NOW + 60_000).safe
    assert not upsert_step(a_spec(5), NOW + 59_999).safe


@pytest.mark.parametrize(
    ("gap", "overlap", "stored"),
    [
        ("shift", "first", ""),
        ("skip", "first", "skip,first"),
        ("shift", "both", "shift,both"),
        ("skip", "both", "skip,both"),
    ],
)
def test_clock_change_policies_stand_beside_the_spec_unless_they_are_the_usual(
    gap: str, overlap: str, stored: str
) -> None:
    spec = a_spec(RepeatPattern.cron("* * * * *", gap=gap, overlap=overlap))

    args = upsert_step(spec, NOW).args

    assert args[-2:] == (encode_spec(spec), stored)


def test_a_removal_is_not_sent_again() -> None:
    answer, [step] = drive(schedule.remove(KEYS, "k"), [1])

    assert answer is True
    assert isinstance(step, Command)
    assert not step.safe


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("k" * 2049, "at most 2048 bytes"),
        ("é" * 1025, "at most 2048 bytes"),
        ("  ", "not blank"),
        ("\ud800", "surrogate"),
        (5, "expects text, got int"),
        (b"k", "expects text, got bytes"),
    ],
)
def test_a_key_that_cannot_be_one_is_refused(key: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        checked_key(key)


def test_the_longest_key_that_name_pattern_and_zone_can_make_is_taken() -> None:
    expression = "0,1,2,3 " + ",".join(["0"] * 500) + " * * * *"
    spec = RepeatableSpec("n" * 256, RepeatPattern.cron(expression, "America/Argentina/ComodRivadavia"), None)
    spec.pattern.check()

    assert checked_key(spec.resolved_key) == spec.resolved_key


@pytest.mark.parametrize("expression", ["0 0 30 2 *", "0 0 0 1 1 * 2020"])
def test_a_pattern_that_never_fires_says_so(expression: str) -> None:
    spec = RepeatableSpec("j", RepeatPattern.cron(expression), None)

    with pytest.raises(NoFutureFire, match=f"cron expression '{expression.replace('*', '.')}' never fires after {NOW}"):
        spec.first_fire_ms(NOW)


def test_a_pattern_that_cannot_be_understood_is_another_error() -> None:
    with pytest.raises(CronError, match="minute '60'") as caught:
        RepeatPattern.cron("60 * * * *").check()

    assert not isinstance(caught.value, NoFutureFire)


# --- A pass --------------------------------------------------------------------------------------------------------


def a_pass(**options: Any) -> Any:
    given: dict[str, Any] = {"batch": 256, "dlq_len": 100, "new_ids": numbered} | options
    return pass_once(KEYS, LEASE, ROOM, **given)


def due(*specs: tuple[bytes, int]) -> list[Any]:
    return [NOW, [part for member, score in specs for part in (member, str(score).encode())]]


def fields_of(spec: StoredSpec, dst: bytes | None = None, catchup: bytes | None = None) -> list[bytes | None]:
    return [encode_spec(spec), dst, catchup]


def sent_calls(step: Any) -> list[tuple[Any, ...]]:
    assert isinstance(step, Batch)
    assert step.safe
    return [command.args for command in step.commands]


def test_a_pass_while_another_leads_reads_nothing() -> None:
    assert drive(a_pass(), [0])[0] is None


def test_a_pass_with_nothing_due_is_two_round_trips() -> None:
    answer, steps = drive(a_pass(), [1, [NOW, []], []])

    assert answer is False
    assert [step for step in steps if isinstance(step, Command) or step.commands] == steps[:2]


def test_all_due_specs_are_fired_in_one_round_trip() -> None:
    replies = [1, due((b"a", NOW), (b"b", NOW - 5)), [fields_of(a_spec(60_000)), fields_of(a_spec(60_000))]]

    answer, steps = drive(a_pass(), [*replies, [[1, 0], [1, 0]]])

    calls = sent_calls(steps[-1])
    assert answer is False
    assert [args[1] for args in calls] == [script("fire_repeat").sha] * 2
    assert [args[8:10] for args in calls] == [("a", str(NOW).encode()), ("b", str(NOW - 5).encode())]


@pytest.mark.parametrize("element", [b"\xc4\x02\x81\xc0", b"\xc6\x00\x00\x00\x01\xc0", b"\x93\x01\x02\x03", b"\x05"])
@pytest.mark.parametrize("retry", [None, RetryOverride(4, Backoff.fixed(7))], ids=["", "retry"])
def test_the_stored_element_goes_into_the_envelope_byte_for_byte(element: bytes, retry: RetryOverride | None) -> None:
    spec = a_spec(60_000, element=element, retry=retry)

    _, steps = drive(a_pass(), [1, due((b"k", NOW)), [fields_of(spec)], [[1, 0]]])

    envelope = sent_calls(steps[-1])[0][-1]
    assert envelope.startswith((b"\x94" if retry is None else b"\x95") + b"\xa4id-0" + element + b"\xcf")
    assert decode_envelope(envelope).retry == retry
    assert decode_envelope(envelope).created_at_ms == NOW


def test_a_pass_that_lost_its_lease_says_that_another_leads() -> None:
    assert drive(a_pass(), [1, due((b"k", NOW)), [fields_of(a_spec(5))], [-2]])[0] is None


@pytest.mark.parametrize(("reply", "more"), [([1, 0], True), (0, False), (-1, False)], ids=["fired", "changed", "full"])
def test_a_full_batch_is_followed_at_once_unless_nothing_moved(reply: Any, more: bool) -> None:
    answer, _ = drive(a_pass(batch=1), [1, due((b"k", NOW)), [fields_of(a_spec(5))], [reply]])

    assert answer is more


def test_a_catch_up_that_goes_on_is_followed_at_once_and_remembers_what_is_left() -> None:
    spec = a_spec(1000, all_of(1500))
    at = NOW - 10_000_000

    answer, steps = drive(a_pass(), [1, due((b"k", at)), [fields_of(spec)], [[1000, 0]]])
    [args] = sent_calls(steps[-1])
    assert answer is True
    assert args[15] == f"{at + 1_000_000},500"

    again = [fields_of(spec, catchup=args[15].encode())]
    answer, steps = drive(a_pass(), [1, due((b"k", at + 1_000_000)), again, [[500, 0]]])
    [args] = sent_calls(steps[-1])
    assert answer is False
    assert len(args) == 17 + 500
    assert args[15] == ""


@pytest.mark.parametrize("catchup", [b"5,500", b"x", b"", b",", b"1,x", str(NOW).encode()])
def test_a_record_of_another_catch_up_is_not_used(catchup: bytes) -> None:
    spec = a_spec(1000, all_of(3))

    _, steps = drive(a_pass(), [1, due((b"k", NOW - 9500)), [fields_of(spec, catchup=catchup)], [[3, 0]]])

    assert len(sent_calls(steps[-1])[0]) == 17 + 3


def test_large_payloads_are_fired_in_calls_of_bounded_size() -> None:
    spec = a_spec(1000, all_of(50), element=payload_element(bytes(300_000)))

    _, steps = drive(a_pass(), [1, due((b"k", NOW - 9500)), [fields_of(spec)], [[3, 0]]])

    assert len(sent_calls(steps[-1])[0]) == 17 + 3


def test_a_pass_ends_after_a_bounded_number_of_jobs_and_is_followed_at_once() -> None:
    spec = fields_of(a_spec(1, all_of(5000)))
    members = [(str(i).encode(), NOW - 90_000) for i in range(20)]
    five = [[1000, 0]] * 5

    more, steps = drive(a_pass(), [1, due(*members), [spec] * 20, five, five])

    assert more is True
    assert sum(len(args) - 17 for step in steps[3:] for args in sent_calls(step)) == PASS_JOBS


BROKEN: list[tuple[str, Any, str]] = [
    ("no bytes", [None, None, None], "its bytes are missing"),
    ("no spec", [b"\xc1", None, None], "expected an array or a map"),
    ("nothing", [b"", None, None], "expected an array or a map"),
    ("no hash", Refusal("WRONGTYPE", "Operation against a key"), "WRONGTYPE Operation"),
    ("no cron", fields_of(a_spec(RepeatPattern.cron("60 * * * *"))), "minute '60'"),
    ("no zone", fields_of(a_spec(RepeatPattern.cron("* * * * *", "Mars/Olympus"))), "time zone 'Mars/Olympus'"),
    ("no dst", fields_of(a_spec(5), dst=b"skip"), "dst expects gap,overlap, found 'skip'"),
    ("odd dst", fields_of(a_spec(RepeatPattern.cron("* * * * *")), dst=b"skip,twice"), "overlap expects first or both"),
    ("raw dst", fields_of(a_spec(5), dst=b"\xff"), "dst expects gap,overlap"),
]


@pytest.mark.parametrize(("fields", "why"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_broken_spec_is_set_aside_with_the_reason_and_the_others_fire(fields: Any, why: str) -> None:
    replies = [1, due((b"bad", NOW), (b"good", NOW)), [fields, fields_of(a_spec(60_000))]]

    answer, steps = drive(a_pass(), [*replies, [1, [1, 0]]])

    aside, fired = sent_calls(steps[-1])
    assert answer is False
    assert aside[1] == script("set_aside_repeat").sha
    assert aside[5] == KEYS.repeat_spec("bad")
    assert aside[-1].startswith("repeat spec bad: ")
    assert why in aside[-1]
    assert fired[1] == script("fire_repeat").sha


def test_a_key_that_is_not_text_is_set_aside_without_touching_another_key() -> None:
    _, steps = drive(a_pass(), [1, due((b"\xff", NOW)), [fields_of(a_spec(5))], [1]])

    [args] = sent_calls(steps[-1])
    assert args[5] == KEYS.repeat
    assert args[8] == b"\xff"


@pytest.mark.parametrize("code", ["LOADING", "NOPERM", "CLUSTERDOWN", "ERR"])
def test_a_server_that_cannot_read_a_spec_does_not_make_it_broken(code: str) -> None:
    with pytest.raises(Refusal, match=code):
        drive(a_pass(), [1, due((b"k", NOW)), [Refusal(code, "no")]])
    with pytest.raises(Refusal, match=code):
        drive(schedule.listed(KEYS, 9), [[b"k", b"5"], [Refusal(code, "no")]])


def test_a_refused_call_is_told_after_all_others_were_made() -> None:
    oom = Refusal("OOM", "command not allowed")

    with pytest.raises(Refusal, match="OOM"):
        drive(a_pass(), [1, due((b"a", NOW), (b"b", NOW)), [fields_of(a_spec(5))] * 2, [oom, [1, 0]]])


def test_a_lost_connection_ends_the_pass_with_what_broke_it() -> None:
    with pytest.raises(ConnectionLost):
        drive(a_pass(), [1, due((b"k", NOW)), [fields_of(a_spec(5))], ConnectionLost("gone", sent=True)])


@pytest.mark.parametrize(
    ("score", "fire_at"), [(b"-inf", 0), (b"-5", 0), (b"12.75", 12), (b"1.5e3", 1500), (b"inf", 2**64)]
)
def test_any_score_is_a_time(score: bytes, fire_at: int) -> None:
    assert score_ms(score) == fire_at


def mutants() -> list[bytes]:
    """Stored specs of the original, and what random damage makes of them."""
    cases = json.loads((Path(__file__).parents[1] / "golden" / "repeat.json").read_text())["cases"]
    blobs = [bytes.fromhex(case["spec_hex"]) for case in cases if "spec_hex" in case]
    rng = random.Random(11)
    found = list(blobs)
    damage: list[Callable[[bytes, int], bytes]] = [
        lambda blob, i: blob[:i],
        lambda blob, i: blob[:i] + bytes([rng.randrange(256)]) + blob[i + 1 :],
        lambda blob, i: (
            blob[:i] + bytes([rng.choice((0x80, 0x90, 0xC0, 0xC1, 0xCB, 0xDD, 0xDF, 0xFF))]) + blob[i + 1 :]
        ),
        lambda blob, i: blob[:i] + blob[i + 1 :],
    ]
    for _ in range(3000):
        blob = rng.choice(blobs)
        found.append(rng.choice(damage)(blob, rng.randrange(len(blob))))
    return found


def test_any_bytes_in_place_of_a_spec_are_fired_or_set_aside_but_never_stop_the_scheduler() -> None:
    outcomes = set()
    for blob in mutants():
        for score in (0, NOW - 86_400_000, NOW):
            _, steps = drive(a_pass(), [1, due((b"k", score)), [[blob, None, None]], [1]])
            outcomes.add(sent_calls(steps[-1])[0][1])

    assert outcomes == {script("fire_repeat").sha, script("set_aside_repeat").sha}


def test_a_spec_that_cannot_be_read_is_left_out_of_the_list() -> None:
    good = a_spec(RepeatPattern.cron("* * * * *"), limit=3)
    replies = [[b"a", b"1", b"b", b"7"], [[b"\xc1", None, None], fields_of(good, dst=b"skip,both")]]

    [meta], steps = drive(schedule.listed(KEYS, 2), replies)

    assert isinstance(steps[0], Command)
    assert steps[0].args == ("ZRANGE", KEYS.repeat, 0, 1, "WITHSCORES")
    assert (meta.key, meta.next_fire_ms, meta.limit, meta.pattern.overlap) == ("b", 7, 3, "both")
    with pytest.raises(DecodeError):
        decode_spec(b"\xc1")
