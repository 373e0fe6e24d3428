"""The scripts of a Spark driver: every return value, and the races they close."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending

SESSION, BATCH = "{chasqui:%s}:spark:s:session", "{chasqui:%s}:spark:s:batch:1"
ME, KEEP = "spark-s", 60_000


class Driver(Pending):
    """Scripts called as a driver with that token would."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        super().__init__(client, queue)
        self.session, self.batch = SESSION % queue, BATCH % queue
        self.paused = self.keys.paused

    def take(self, holder: str = "h", ttl_ms: int = 10_000) -> Any:
        return self.call("take_session", [self.session], holder, ttl_ms, KEEP, "label", "{}")

    def keep(self, token: int, ttl_ms: int = 10_000, linger_ms: int = 0) -> Any:
        return self.call("keep_session", [self.session, self.batch], token, ttl_ms, KEEP, linger_ms)

    def claim(
        self, token: int, limit: int = 100, count: int = 1000, idle: int = 0, upto: str = "", room: int = 1_048_576
    ) -> Any:
        keys = [self.session, self.batch, self.keys.stream, self.paused]
        return self.call("claim_batch", keys, token, GROUP, ME, limit, count, idle, upto, KEEP, room)

    def seal(self, token: int) -> Any:
        return self.call("seal_batch", [self.session, self.batch], token)

    def plan(self, token: int, holder: str = "h", silent_ms: int = 0) -> Any:
        return self.call("plan_batch", [self.session, self.batch], token, holder, silent_ms)

    def begin(self, token: int, task: str = "t", run: str = "r") -> Any:
        return self.call("begin_task", [self.session, self.batch], token, run, task)

    def end(self, token: int, task: str = "t") -> Any:
        return self.call("end_task", [self.batch], token, task)

    def tasks(self, token: int) -> bytes | None:
        found: bytes | None = self.client.hget(self.batch, f"tasks:{token}")
        return found

    def revalidate(self, token: int, block: int = 1) -> Any:
        keys = [self.session, self.batch, self.keys.stream]
        return self.call("revalidate_batch", keys, token, GROUP, ME, block, 30_000)

    def settle(self, block: int = 1, how: str = "ack") -> Any:
        return self.call("settle_batch", [self.batch, self.keys.stream], GROUP, ME, block, how, 30_000)

    def release(self, token: int, block: int = 1, narrow: int = 0) -> Any:
        keys = [self.session, self.batch, self.keys.stream]
        return self.call("release_batch", keys, token, GROUP, ME, block, 30_000, "released", narrow)


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Driver:
    return Driver(client, queue)


# The lease


def test_a_lease_is_taken_once_and_again_only_by_the_same_process(q: Driver) -> None:
    assert q.take("a") == [1, 1]
    assert q.take("a") == [1, 1]
    refused = q.take("b")

    assert refused[:2] == [0, 1]
    assert 9_000 < refused[2] <= 10_000
    assert refused[3] == q.client.hget(q.session, "until")


def test_a_lease_that_lapsed_or_was_given_back_goes_to_the_next_with_a_higher_token(q: Driver) -> None:
    q.take("a", ttl_ms=0)
    assert q.take("b") == [1, 2]
    assert q.keep(2, 0) == 1
    assert q.take("c") == [1, 3]


def test_an_old_token_does_nothing_anywhere(q: Driver) -> None:
    q.add("a")
    q.take("a", ttl_ms=0)
    q.claim(1)
    q.take("b")
    before = q.client.hgetall(q.batch), q.pending

    assert q.keep(1) == 0
    assert q.claim(1) == [-1]
    assert q.seal(1) == -1
    assert q.plan(1) == [-1]
    assert q.revalidate(1) == [-1]
    assert q.release(1) == -1

    assert (q.client.hgetall(q.batch), q.pending) == before


def test_session_and_batch_expire(q: Driver) -> None:
    q.add("a")
    q.take()
    q.claim(1)
    q.keep(1)

    assert 0 < q.client.pttl(q.session) <= KEEP
    assert 0 < q.client.pttl(q.batch) <= KEEP


# Taking


def test_claims_fill_a_batch_to_its_limit_and_no_further_however_often_they_are_sent(q: Driver) -> None:
    ids = q.add(*"abcdef")
    q.take()

    assert q.claim(1, limit=4, count=3) == [3, 3, 3, 0]
    assert q.claim(1, limit=4, count=3) == [1, 4, 4, 0]
    assert q.claim(1, limit=4, count=3) == [0, 4, 4, 0]

    assert [entry for entry, owner, _ in q.pending if owner == ME] == ids[:4]
    assert q.client.hget(q.batch, "b1").split() == ids[:3]


def test_a_sealed_batch_takes_no_more_and_an_empty_one_is_gone(q: Driver) -> None:
    q.take()
    q.claim(1)
    assert q.seal(1) == 0
    assert not q.client.exists(q.batch)
    q.add("a")
    q.claim(1)
    q.add("b")

    assert q.seal(1) == 1
    assert q.claim(1) == [0, 1, 1, 0]


def test_nothing_is_taken_from_a_paused_queue(q: Driver) -> None:
    q.add("a")
    q.take()
    q.client.set(q.paused, 1)

    assert q.claim(1) == [0, 0, 0, 0]


def test_new_jobs_are_taken_up_to_an_entry(q: Driver) -> None:
    ids = q.add(*"abc")
    q.take()

    assert q.claim(1, upto=ids[1].decode())[0] == 2
    assert q.claim(1, upto=ids[1].decode())[0] == 0


def test_a_call_ends_when_its_megabyte_is_full_also_with_stale_jobs_and_where_small_ones_come_first(q: Driver) -> None:
    q.add(*(["x"] * 20 + ["y" * 20_000] * 180))
    q.take()

    assert q.claim(1, limit=1000) == [110, 110, 20 + 90 * 20_000, 0]
    q.give("dead", [entry for entry, _, _ in q.pending], idle_ms=31_000)
    q.client.delete(q.batch)
    assert q.claim(1, idle=30_000) == [73, 73, 20 + 53 * 20_000, 0]


def test_large_entries_before_the_last_one_to_be_taken_are_looked_at_a_few_at_a_time(q: Driver) -> None:
    ids = q.add(*(["x" * 300_000] * 30))
    q.add("later")
    q.take()

    taken = [q.claim(1, upto=ids[-1].decode())[0] for _ in range(4)]

    assert sum(taken) == 30
    assert max(taken) <= 10


def test_stale_jobs_come_with_their_count_and_only_stale_ones(q: Driver) -> None:
    (stale,) = q.taken("dead", "a", idle_ms=31_000, deliveries=2)
    q.taken("alive", "b")
    q.take()

    assert q.claim(1, idle=30_000)[0] == 1

    assert q.client.hget(q.batch, "b1") == stale + b":2"
    assert (stale, ME, 3) in q.pending


def test_a_stale_job_whose_record_is_gone_is_not_taken_as_a_job(q: Driver) -> None:
    (stale,) = q.taken("dead", "a", idle_ms=31_000)
    q.client.xdel(q.keys.stream, stale)
    q.take()

    q.claim(1, idle=30_000)
    q.seal(1)
    q.settle()

    assert q.pending == []


# Running


def test_a_run_is_counted_once_per_process_and_only_when_a_task_had_begun_the_one_before(q: Driver) -> None:
    q.take()
    assert q.plan(1) == [0]
    q.add("a")
    q.claim(1)

    assert q.plan(1, "x") == [1, 1, 1, 1, b"", 1]
    assert q.plan(1, "x") == [1, 1, 1, 1, b"", 0]
    assert q.plan(1, "y") == [1, 1, 1, 1, b"", 1]
    q.begin(1)
    assert q.plan(1, "y") == [1, 1, 1, 1, b"", 0]
    assert q.plan(1, "z") == [1, 2, 1, 1, b"", 1]


def test_a_task_is_counted_once_from_its_beginning_to_its_end(q: Driver) -> None:
    q.add("a")
    q.take()
    q.claim(1)

    assert [q.begin(1, "a"), q.begin(1, "a"), q.begin(1, "b")] == [1, 1, 1]
    assert (q.tasks(1), q.client.hget(q.batch, "run")) == (b"2", b"r")
    assert [q.end(1, "a"), q.end(1, "a")] == [1, 0]
    assert q.tasks(1) == b"1"


def test_a_batch_is_not_planned_anew_while_tasks_of_the_driver_before_live(q: Driver) -> None:
    q.add("a")
    q.take("a", ttl_ms=0)
    q.claim(1)
    q.plan(1, "a")
    q.begin(1)
    q.take("b")

    busy, left = q.plan(2, "b", silent_ms=60_000)

    assert (busy, 0 < left <= 60_000) == (2, True)
    assert q.plan(2, "b", silent_ms=0)[:2] == [1, 2]
    q.take("c", ttl_ms=0)
    q.end(1)
    assert q.plan(2, "c", silent_ms=60_000)[0] == 1


def test_a_batch_that_was_begun_is_not_planned_anew_while_its_jobs_may_be_at_work_behind_its_tasks(q: Driver) -> None:
    q.add("a")
    q.take("a")
    q.claim(1)
    q.plan(1, "a")
    q.keep(1, 0, linger_ms=30_000)
    q.take("b", ttl_ms=0)
    assert q.plan(2, "b")[0] == 1  # no task had begun it
    q.begin(2)
    q.end(2)
    q.take("c")

    busy, left = q.plan(3, "c")

    assert (busy, 25_000 < left <= 30_000) == (2, True)
    q.keep(3, 0)
    q.take("d")
    assert q.plan(4, "d")[0] == 1


def test_a_task_that_comes_too_late_begins_nothing(q: Driver) -> None:
    assert q.begin(1) == 0
    assert q.end(1) == 0
    assert not q.client.exists(q.batch)
    q.add("a")
    q.take("a", ttl_ms=0)
    q.claim(1)
    q.take("b")
    assert q.begin(1) == -1
    q.release(2)
    assert q.begin(2) == 0
    assert q.client.hget(q.batch, "run") is None


def test_revalidation_keeps_ours_takes_back_stale_ones_and_strikes_out_the_rest(q: Driver) -> None:
    ids = q.add(*"abcd")
    q.take()
    q.claim(1)
    q.give(ME, [ids[0]], idle_ms=20_000)
    q.give("dead", [ids[1]], idle_ms=31_000, deliveries=4)
    q.give("alive", [ids[2]])
    q.client.xack(q.keys.stream, GROUP, ids[3])

    assert q.revalidate(1) == [2, 2]
    assert q.revalidate(1) == [2, 0]

    assert q.client.hget(q.batch, "b1") == ids[0] + b" " + ids[1] + b":4"
    assert q.client.hget(q.batch, "count") == b"2"
    assert q.idle_ms(ids[0]) < 10_000


# Ending


@pytest.mark.parametrize("again", [False, True])
def test_settling_ends_what_is_ours_once_and_the_batch_with_its_last_block(q: Driver, again: bool) -> None:
    ids = q.add(*"abc")
    q.take()
    if again:
        q.client.xreadgroup(GROUP, "dead", {q.keys.stream: ">"})
        q.give("dead", ids, idle_ms=40_000)
        q.claim(1, idle=30_000)
    else:
        q.claim(1, count=2)
        q.claim(1)
    q.give("other", [ids[1]])

    assert [q.settle(1), q.settle(2), q.settle(1)] == ([2, 0, 0] if again else [1, 1, 0])

    assert [(entry, owner) for entry, owner, _ in q.pending] == [(ids[1], "other")]
    assert q.stream == ["b"]
    assert not q.client.exists(q.batch)


@pytest.mark.parametrize("how", ["release", "drop"])
def test_leftovers_are_released_with_the_count_before_or_left_alone(q: Driver, how: str) -> None:
    (entry,) = q.taken("dead", "a", idle_ms=31_000, deliveries=2)
    q.take()
    q.claim(1, idle=30_000)

    assert q.settle(1, how) == (1 if how == "release" else 0)

    assert q.pending == [(entry, ME, 2 if how == "release" else 3)]
    assert (q.idle_ms(entry) >= 30_000) == (how == "release")
    assert not q.client.exists(q.batch)


def test_a_released_batch_is_marked_and_its_jobs_are_as_if_never_delivered(q: Driver) -> None:
    ids = q.add(*"ab")
    q.take()
    q.claim(1)
    q.give("other", [ids[1]])

    assert q.release(1) == 1

    assert q.plan(1)[4] == b"released"
    assert q.pending[0] == (ids[0], ME, 0)
    assert q.idle_ms(ids[0]) >= 30_000
    assert q.settle() == 0
    assert not q.client.exists(q.batch)
    assert q.stream == ["a", "b"]


def test_a_narrowed_session_takes_small_batches_until_as_many_jobs_were_taken(q: Driver) -> None:
    q.add(*"abcd")
    q.take()
    q.claim(1)
    q.seal(1)
    q.release(1, narrow=3)
    q.settle()

    assert q.claim(1, idle=30_000) == [3, 3, 3, 1]
    assert q.seal(1) == 3
    q.client.delete(q.batch)
    assert q.claim(1, idle=30_000)[3] == 1
    assert q.seal(1) == 1
    assert q.client.hget(q.session, "narrow_left") is None


# Outcomes


def test_done_jobs_end_only_while_a_spark_consumer_has_them(q: Driver) -> None:
    mine = q.taken("spark-1", "a", "b")
    (other,) = q.taken("c-1", "c")
    result = q.keys.result("j")
    args = [3, mine[0], mine[1], other, 1, "r"]

    assert q.call("settle_done", [q.keys.stream, result], GROUP, "spark-", 60, *args) == [1, 1, 0]
    assert q.client.get(result) == b"r"
    assert 0 < q.client.ttl(result) <= 60
    q.client.delete(result)
    assert q.call("settle_done", [q.keys.stream, result], GROUP, "spark-", 60, *args) == [0, 0, 0]

    assert not q.client.exists(result)
    assert q.stream == ["c"]


def test_done_jobs_are_found_in_any_order_and_among_those_of_others(q: Driver) -> None:
    a = q.taken("spark-1", "a")[0]
    b = q.taken("c-1", "b", "c", "d")[0]
    e, f = q.taken("spark-2", "e", "f")
    results = [q.keys.result(name) for name in ("of-f", "of-b", "of-a")]
    keys = [q.keys.stream, *results]

    assert q.call("settle_done", [q.keys.stream], GROUP, "spark-", 60, 0) == []
    assert q.call("settle_done", keys, GROUP, "spark-", 60, 3, f, b, a, 1, "F", 2, "B", 3, "A") == [1, 0, 1]
    assert q.call("settle_done", [q.keys.stream], GROUP, "spark-", 60, 2, b, e) == [0, 1]

    assert [q.client.get(result) for result in results] == [b"F", None, b"A"]
    assert q.stream == ["b", "c", "d"]


def test_turns_of_a_pace_follow_each_other(q: Driver) -> None:
    key = q.keys.replay_pace("p")
    begin = time.monotonic()

    waits = [q.call("take_turn", [key], 100, 10) for _ in range(4)]
    took_ms = 1000 * (time.monotonic() - begin)

    assert waits[0] == 0
    assert all(100 * i - took_ms - 1 <= wait <= 100 * i + 1 for i, wait in enumerate(waits))
    assert 0 < q.client.pttl(key) < 62_000
