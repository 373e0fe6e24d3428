"""release_lease: a holder gives its own lease back, and never another's."""

from __future__ import annotations

from typing import Any

import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script


def release(client: redis.Redis, queue: str, holder: str) -> Any:
    return client.eval(script("release_lease").source, 1, Keys(queue).promoter_lock, holder)


def test_the_holder_gives_it_back(client: redis.Redis, queue: str) -> None:
    client.set(Keys(queue).promoter_lock, "me", px=60_000)

    assert release(client, queue, "me") == 1

    assert not client.exists(Keys(queue).promoter_lock)


def test_the_lease_of_another_stays(client: redis.Redis, queue: str) -> None:
    client.set(Keys(queue).promoter_lock, "other", px=60_000)

    assert release(client, queue, "me") == 0

    assert client.get(Keys(queue).promoter_lock) == b"other"


def test_a_lease_that_nobody_has_is_no_error(client: redis.Redis, queue: str) -> None:
    assert release(client, queue, "me") == 0
