"""release_claims: unstarted jobs are free at once, as if they had never been delivered."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def release(q: Pending, *entries: tuple[bytes, int], idle_ms: int = 30_000) -> Any:
    """Entry id and deliveries before ours of each."""
    return q.call("release_claims", [q.keys.stream], GROUP, "me", idle_ms, *(part for one in entries for part in one))


def test_a_released_entry_is_stale_at_once_and_has_the_count_before_ours(q: Pending) -> None:
    first, second = q.taken("me", "a", "b", deliveries=5)

    assert release(q, (first, 4), (second, 0)) == 2

    assert [(entry, count) for entry, _, count in q.pending] == [(first, 4), (second, 0)]
    assert min(q.idle_ms(first), q.idle_ms(second)) >= 30_000


def test_another_worker_takes_it_with_that_count(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    release(q, (entry, 0))

    taken, _, _ = q.call("claim_stale", [q.keys.stream], GROUP, "other", 30_000, 10, 0)

    assert taken == [[entry, [b"d", b"a"], 0]]


def test_what_another_has_or_nobody_has_is_left_alone(q: Pending) -> None:
    first, second, third = q.taken("me", "a", "b", "c", deliveries=2)
    q.give("other", [first], deliveries=3)
    q.client.xack(q.keys.stream, GROUP, second)

    assert release(q, (first, 0), (second, 0), (third, 0)) == 1

    assert [(entry, owner) for entry, owner, _ in q.pending] == [(first, "other"), (third, q.pending[1][1])]
    assert q.pending[0] == (first, "other", 3)
    assert q.idle_ms(first) < 30_000


def test_a_second_release_of_the_same_changes_nothing(q: Pending) -> None:
    (entry,) = q.taken("me", "a", deliveries=3)
    release(q, (entry, 2))
    before = q.pending

    release(q, (entry, 2))

    assert [(found, count) for found, _, count in q.pending] == [(found, count) for found, _, count in before]


def test_nothing_to_release_is_fine(q: Pending) -> None:
    assert release(q) == 0
