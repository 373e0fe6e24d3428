"""ack_delete: jobs that are done leave the pending list and the stream together, once."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def ack(q: Pending, *ids: bytes, group: str = GROUP) -> Any:
    return q.call("ack_delete", [q.keys.stream], group, *ids)


def test_acked_entries_leave_the_pending_list_and_the_stream(q: Pending) -> None:
    first, second, third = q.taken("me", "a", "b", "c")

    assert ack(q, first, third) == 2

    assert (q.stream, q.pending) == (["b"], [(second, "me", 1)])


def test_a_second_ack_counts_nothing(q: Pending) -> None:
    (entry,) = q.taken("me", "a")

    assert [ack(q, entry), ack(q, entry)] == [1, 0]

    assert (q.stream, q.pending) == ([], [])


def test_an_entry_that_another_worker_took_over_may_be_acked_by_whoever_did_the_work(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.give("other", [entry])

    assert ack(q, entry) == 1

    assert (q.stream, q.pending) == ([], [])


def test_a_thousand_are_acked_in_one_call(q: Pending) -> None:
    entries = q.taken("me", *(str(n) for n in range(1000)))

    assert ack(q, *entries) == 1000

    assert q.stream == []


def test_a_group_or_stream_that_is_gone_is_no_error(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.client.xgroup_destroy(q.keys.stream, GROUP)

    assert ack(q, entry) == 0

    q.client.delete(q.keys.stream)
    assert ack(q, entry) == 0
