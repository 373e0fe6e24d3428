"""forget_consumers: names of workers that are gone go, and nobody's jobs with them."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending
from tests.support import eventually


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def forget(q: Pending, idle_ms: int, own: str = "") -> Any:
    return q.call("forget_consumers", [q.keys.stream], GROUP, idle_ms, own)


def names(q: Pending) -> list[str]:
    return sorted(info["name"].decode() for info in q.client.xinfo_consumers(q.keys.stream, GROUP))


def test_who_is_idle_for_so_long_and_has_nothing_pending_is_forgotten(q: Pending) -> None:
    (entry,) = q.taken("holds", "a")
    q.client.xgroup_createconsumer(q.keys.stream, GROUP, "gone")
    eventually(lambda: all(c["idle"] > 30 for c in q.client.xinfo_consumers(q.keys.stream, GROUP)))

    assert forget(q, 30) == [b"gone"]

    assert names(q) == ["holds"]
    assert q.pending == [(entry, "holds", 1)]


def test_who_was_there_lately_stays(q: Pending) -> None:
    q.client.xgroup_createconsumer(q.keys.stream, GROUP, "new")

    assert forget(q, 60_000) == []

    assert names(q) == ["new"]


def test_our_own_name_goes_at_once_if_nothing_is_pending(q: Pending) -> None:
    q.client.xgroup_createconsumer(q.keys.stream, GROUP, "me")
    q.client.xgroup_createconsumer(q.keys.stream, GROUP, "other")

    assert forget(q, 60_000, "me") == [b"me"]

    assert names(q) == ["other"]


def test_our_own_name_stays_with_what_is_pending_for_it(q: Pending) -> None:
    (entry,) = q.taken("me", "a")

    assert forget(q, 60_000, "me") == []

    assert q.pending == [(entry, "me", 1)]


def test_without_a_group_it_is_an_error(q: Pending) -> None:
    q.client.xgroup_destroy(q.keys.stream, GROUP)

    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        forget(q, 1)
