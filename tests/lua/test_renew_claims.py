"""renew_claims: what is still ours becomes fresh again; what is not is named, and not stolen back."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def renew(q: Pending, *ids: bytes) -> Any:
    return q.call("renew_claims", [q.keys.stream], GROUP, "me", *ids)


def test_our_claims_become_fresh_and_keep_their_count_of_deliveries(q: Pending) -> None:
    (entry,) = q.taken("me", "a", idle_ms=50_000, deliveries=4)

    assert renew(q, entry) == []

    assert q.idle_ms(entry) < 5_000
    assert q.pending == [(entry, "me", 4)]


def test_a_claim_that_another_has_is_named_and_left_to_it(q: Pending) -> None:
    first, second = q.taken("me", "a", "b", idle_ms=50_000)
    q.give("other", [first], idle_ms=7_000, deliveries=2)

    assert renew(q, first, second) == [first]

    assert q.pending == [(first, "other", 2), (second, "me", 1)]
    assert q.idle_ms(first) >= 7_000


def test_a_settled_or_unknown_entry_is_named(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.client.xack(q.keys.stream, GROUP, entry)

    assert renew(q, entry, b"1-1") == [entry, b"1-1"]

    assert q.pending == []


def test_an_entry_whose_record_is_gone_is_no_error(q: Pending) -> None:
    (entry,) = q.taken("me", "a")
    q.client.xdel(q.keys.stream, entry)

    assert renew(q, entry) in ([], [entry])


def test_claims_are_found_in_any_order_and_among_those_of_others(q: Pending) -> None:
    (a,) = q.taken("me", "a", idle_ms=50_000)
    (b,) = q.taken("other", "b", idle_ms=50_000)
    c, d = q.taken("me", "c", "d", idle_ms=50_000)

    assert renew(q) == []
    assert renew(q, d, b, a) == [b]

    assert [q.idle_ms(entry) >= 5_000 for entry in (a, b, c, d)] == [False, True, True, False]


def test_a_thousand_are_renewed_in_one_call(q: Pending) -> None:
    entries = q.taken("me", *(str(n) for n in range(1000)), idle_ms=50_000)

    assert renew(q, *entries) == []

    assert max(q.idle_ms(entry) for entry in (entries[0], entries[-1])) < 5_000


def test_without_a_group_it_is_an_error(q: Pending) -> None:
    q.client.xgroup_destroy(q.keys.stream, GROUP)

    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        renew(q, b"1-1")
