"""forget_consumers: names of workers that are gone go, and nobody's jobs with them."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.worker_pending import GROUP, Pending


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


def forget(q: Pending, *names: str) -> Any:
    return q.call("forget_consumers", [q.keys.stream], GROUP, *names)


def names(q: Pending) -> list[str]:
    return sorted(info["name"].decode() for info in q.client.xinfo_consumers(q.keys.stream, GROUP))


def test_a_name_goes_only_if_nothing_is_pending_for_it(q: Pending) -> None:
    (entry,) = q.taken("holds", "a")
    for name in ("gone", "other"):
        q.client.xgroup_createconsumer(q.keys.stream, GROUP, name)

    assert forget(q, "gone", "holds", "nobody") == [b"gone", b"nobody"]

    assert names(q) == ["holds", "other"]
    assert q.pending == [(entry, "holds", 1)]


def test_without_a_group_it_is_an_error(q: Pending) -> None:
    q.client.xgroup_destroy(q.keys.stream, GROUP)

    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        forget(q, "gone")
