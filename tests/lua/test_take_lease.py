"""take_lease: one holder at a time, and no lease without an end."""

from __future__ import annotations

from typing import Any

import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script
from tests.support import eventually


def take(client: redis.Redis, queue: str, holder: str, ttl_ms: int = 60_000) -> Any:
    return client.eval(script("take_lease").source, 1, Keys(queue).promoter_lock, holder, ttl_ms)


def test_a_free_lease_is_taken_with_its_end(client: redis.Redis, queue: str) -> None:
    assert take(client, queue, "me") == 1

    assert client.get(Keys(queue).promoter_lock) == b"me"
    assert 59_000 < client.pttl(Keys(queue).promoter_lock) <= 60_000


def test_the_holder_renews_it(client: redis.Redis, queue: str) -> None:
    take(client, queue, "me", 1_000)

    assert take(client, queue, "me", 60_000) == 1

    assert client.pttl(Keys(queue).promoter_lock) > 59_000


def test_another_neither_gets_nor_lengthens_it(client: redis.Redis, queue: str) -> None:
    take(client, queue, "me", 30_000)

    assert take(client, queue, "other", 60_000) == 0

    assert client.get(Keys(queue).promoter_lock) == b"me"
    assert client.pttl(Keys(queue).promoter_lock) <= 30_000


def test_after_its_end_anybody_gets_it(client: redis.Redis, queue: str) -> None:
    take(client, queue, "me", 50)

    eventually(lambda: take(client, queue, "other") == 1, within=2)

    assert take(client, queue, "me") == 0
