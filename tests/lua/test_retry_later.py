"""retry_later: a failed job goes to the delayed set once, and only while it is ours."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def retry(q: Pending, *failed: tuple[bytes, int, str], consumer: str = "me") -> Any:
    """Entry id, wait and member of each."""
    return q.call("retry_later", [q.keys.stream, q.keys.delayed], GROUP, consumer, *(p for one in failed for p in one))


def test_a_failed_job_moves_to_the_delayed_set_at_the_servers_time_plus_its_wait(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    before = q.now_ms()

    assert retry(q, (entry, 5_000, "member")) == [1]

    assert before + 5_000 <= q.delayed["member"] <= q.now_ms() + 5_000
    assert (q.stream, q.pending) == ([], [])


def test_a_second_call_moves_nothing_and_keeps_the_first_time(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    assert retry(q, (entry, 5_000, "member")) == [1]
    at = q.delayed

    assert retry(q, (entry, 99_000, "member")) == [0]

    assert q.delayed == at


def test_a_job_that_another_worker_took_over_stays_with_it(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.give("other", [entry])

    assert retry(q, (entry, 0, "member")) == [0]

    assert (q.stream, q.pending, q.delayed) == (["a"], [(entry, "other", 1)], {})


def test_each_of_a_batch_is_decided_by_itself(q: Pending) -> None:
    first, second, third = q.taken("me", "a", "b", "c")
    q.give("other", [second])

    assert retry(q, (first, 1, "m1"), (second, 1, "m2"), (third, 1, "m3")) == [1, 0, 1]

    assert sorted(q.delayed) == ["m1", "m3"]
    assert (q.stream, q.pending) == (["b"], [(second, "other", 1)])


@pytest.mark.parametrize("wait", [0, 2**31, 2**53, 2**63 - 1])
def test_any_wait_is_written_as_a_whole_number(q: Pending, wait: int) -> None:
    (entry,) = q.taken("me", "a")
    before = q.now_ms()

    assert retry(q, (entry, wait, "member")) == [1]

    assert q.delayed["member"] == pytest.approx(before + wait, abs=60_000, rel=1e-9)


def test_a_delayed_key_of_another_type_is_an_error_and_the_job_stays(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.client.set(q.keys.delayed, "mine", ex=60)

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        retry(q, (entry, 0, "member"))

    assert (q.stream, q.pending) == (["a"], [(entry, "me", 1)])


def test_a_member_may_hold_any_bytes(q: Pending) -> None:
    (entry,) = q.taken("me", "a")

    q.call("retry_later", [q.keys.stream, q.keys.delayed], GROUP, "me", entry, 0, b"\x00\xff\r\n")

    assert q.client.zrange(q.keys.delayed, 0, -1) == [b"\x00\xff\r\n"]
