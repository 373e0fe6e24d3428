"""ack_with_results: the result is stored by the worker whose ack counted, and by nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def ack(q: Pending, *done: tuple[bytes, str, bytes], ttl_s: int = 60) -> Any:
    """Entry id, job id and result of each."""
    keys = [q.keys.stream, *(q.keys.result(job_id) for _, job_id, _ in done)]
    return q.call("ack_with_results", keys, GROUP, ttl_s, *(part for one in done for part in (one[0], one[2])))


def test_results_are_stored_with_their_time_to_live_and_the_entries_leave(q: Pending) -> None:
    first, second = q.taken("me", "a", "b")

    assert ack(q, (first, "j1", b"\x01"), (second, "j2", b"\x02"), ttl_s=121) == [1, 1]

    assert q.client.mget(q.keys.result("j1"), q.keys.result("j2")) == [b"\x01", b"\x02"]
    assert q.client.ttl(q.keys.result("j1")) in (120, 121)
    assert (q.stream, q.pending) == ([], [])


def test_a_job_that_is_not_pending_any_more_stores_nothing_and_the_others_do(q: Pending) -> None:
    first, second = q.taken("me", "a", "b")
    q.client.xack(q.keys.stream, GROUP, first)

    assert ack(q, (first, "j1", b"late"), (second, "j2", b"\x02")) == [0, 1]

    assert q.client.mget(q.keys.result("j1"), q.keys.result("j2")) == [None, b"\x02"]
    assert q.stream == ["a"]  # not pending: whose it is, we do not know


def test_a_second_call_changes_neither_result_nor_time_to_live(q: Pending) -> None:
    (entry,) = q.taken("me", "a")

    assert ack(q, (entry, "j", b"first"), ttl_s=60) == [1]
    assert ack(q, (entry, "j", b"second"), ttl_s=9999) == [0]

    assert q.client.get(q.keys.result("j")) == b"first"
    assert q.client.ttl(q.keys.result("j")) <= 60


def test_a_result_that_the_server_refuses_does_not_bring_the_job_back(q: Pending) -> None:
    (entry,) = q.taken("me", "a")

    assert ack(q, (entry, "j", b"x"), ttl_s=0) == [1]  # no SET takes that

    assert (q.stream, q.pending, q.client.get(q.keys.result("j"))) == ([], [], None)


def test_without_a_group_nothing_is_stored(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.client.xgroup_destroy(q.keys.stream, GROUP)

    assert ack(q, (entry, "j", b"x")) == [0]

    assert q.client.get(q.keys.result("j")) is None
