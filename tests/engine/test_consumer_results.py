"""Results: what handlers return, stored as the original stores it, where it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from chasqui import Producer
from tests.engine.seen import key
from tests.engine.worker_tools import dead_letters, eventually, nothing_left, working


@pytest.mark.parametrize(
    ("returned", "stored"),
    [({"r": 1}, "81a17201"), (False, "c2"), (0, "00"), ("", "a0"), (b"", "c400"), ([], "90"), (None, None)],
    ids=repr,
)
def test_a_result_is_stored_as_messagepack_and_none_is_not(
    url: str, client: redis.Redis, queue: str, returned: Any, stored: str | None
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")

        with working(url, queue, lambda _: returned, store_results=True, result_ttl_secs=121):
            eventually(lambda: nothing_left(client, queue))

    found = client.get(key(queue, "result:j"))
    assert (found and found.hex()) == stored
    assert client.ttl(key(queue, "result:j")) in ((120, 121) if stored else (-2,))


def test_results_are_not_stored_unless_asked_for(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")

        with working(url, queue, lambda _: object()):
            eventually(lambda: nothing_left(client, queue))

        assert producer.get_result("j") is None
    assert dead_letters(client, queue) == []


def test_a_result_that_cannot_be_stored_fails_the_run(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")

        with working(url, queue, lambda _: {"x": {1, 2}}, store_results=True, max_attempts=1):
            eventually(lambda: dead_letters(client, queue))

    assert b"PayloadError: payload['x'] is a set" in dead_letters(client, queue)[0]["error"]


def test_a_failed_run_stores_no_result(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add(1, id="j")

        with working(url, queue, lambda _: 1 / 0, store_results=True, max_attempts=1):
            eventually(lambda: dead_letters(client, queue))

        assert producer.get_result("j") is None
