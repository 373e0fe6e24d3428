"""claim_stale: what nobody has renewed for long enough is taken over, by one worker, with its count before."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending

MIN_IDLE = 10_000


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def claim(q: Pending, *, consumer: str = "me", count: int = 10, min_idle: int = MIN_IDLE, start: int = 0) -> Any:
    return q.call("claim_stale", [q.keys.stream], GROUP, consumer, min_idle, count, start)


def test_a_stale_entry_is_taken_with_its_fields_and_the_deliveries_before(q: Pending) -> None:
    (entry,) = q.taken("dead", "a", idle_ms=MIN_IDLE, deliveries=3)

    assert claim(q) == [[[entry, [b"d", b"a"], 3]], -1, 0]

    assert q.pending == [(entry, "me", 4)]
    assert q.idle_ms(entry) < MIN_IDLE


def test_a_fresh_entry_stays_and_the_answer_tells_when_to_look_again(q: Pending) -> None:
    (entry,) = q.taken("alive", "a", idle_ms=4_000)

    taken, wait, _ = claim(q)

    assert (taken, q.pending) == ([], [(entry, "alive", 1)])
    assert 5_000 < wait <= 6_000


def test_the_wait_is_that_of_the_entry_that_is_stale_first_and_our_own_do_not_count(q: Pending) -> None:
    q.taken("me", "mine", idle_ms=9_900)
    q.taken("other", "x", idle_ms=1_000)
    q.taken("third", "y", idle_ms=3_000)

    assert 6_000 < claim(q)[1] <= 7_000


def test_nothing_pending_elsewhere_means_no_wait(q: Pending) -> None:
    q.add("waiting")
    q.taken("me", "mine")

    assert claim(q) == [[], -1, 0]


def test_two_who_look_share_what_is_stale(q: Pending) -> None:
    entries = q.taken("dead", *"abcde", idle_ms=MIN_IDLE)

    first, second = claim(q, consumer="one", count=3)[0], claim(q, consumer="two", count=3)[0]

    assert [entry[0] for entry in first + second] == entries
    assert (len(first), len(second)) == (3, 2)


def test_a_pending_entry_whose_record_is_gone_is_dropped(q: Pending) -> None:
    first, second = q.taken("dead", "a", "b", idle_ms=MIN_IDLE)
    q.client.xdel(q.keys.stream, first)

    assert [entry[0] for entry in claim(q)[0]] == [second]

    assert [entry for entry, _, _ in q.pending] == [second]


def test_no_more_than_about_a_megabyte_is_taken_at_a_time_but_always_one(q: Pending) -> None:
    entries = q.taken("dead", *("x" * 400_000 for _ in range(5)), idle_ms=MIN_IDLE)

    assert [entry[0] for entry in claim(q)[0]] == entries[:3]
    assert [entry[0] for entry in claim(q)[0]] == entries[3:]


def test_without_a_group_it_is_an_error(q: Pending) -> None:
    q.client.xgroup_destroy(q.keys.stream, GROUP)

    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        claim(q)


def test_of_very_many_each_call_looks_at_a_part_and_the_next_goes_on_behind_it(q: Pending) -> None:
    held(q, 25_000)
    stale = [f"{n}-0".encode() for n in (9, 12_000, 24_999)]
    q.give("dead", stale, idle_ms=MIN_IDLE)

    found, start, starts = [], 0, []
    for _ in range(6):
        taken, wait, start = claim(q, start=int(start))
        found += [entry[0] for entry in taken]
        starts.append(int(start))
        assert wait == (1 if taken else -1)

    assert found == stale
    assert starts == [1, 8335, 8335, 16669, 16669, 1]


def test_a_place_that_is_behind_all_that_is_pending_by_now_means_the_beginning(q: Pending) -> None:
    held(q, 10_001)
    q.give("dead", [b"1-0"], idle_ms=MIN_IDLE)

    assert [entry[0] for entry in claim(q, start=99_999)[0]] == [b"1-0"]


def held(q: Pending, count: int) -> None:
    """So many that a worker holds, a millisecond apart."""
    pipe = q.client.pipeline(transaction=False)
    for n in range(1, count + 1):
        pipe.xadd(q.keys.stream, {"d": "x"}, id=f"{n}-0")
    pipe.execute()
    q.client.xreadgroup(GROUP, "alive", {q.keys.stream: ">"}, count=count)
