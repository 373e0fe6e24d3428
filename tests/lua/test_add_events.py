"""add_events: many events of one kind, each an entry as single ones are."""

from __future__ import annotations

import pytest
import redis

from chasqui.protocol.keys import Keys
from tests.lua.conftest import Run


def test_each_id_gets_an_entry_with_the_common_fields_behind_it(run: Run, client: redis.Redis, keys: Keys) -> None:
    run("add_events", [keys.events], 100, "active", 4, "ts", 7, "attempt", 1, "a", "b")

    entries = [list(fields.items()) for _, fields in client.xrange(keys.events)]
    assert entries == [
        [(b"e", b"active"), (b"id", job_id), (b"ts", b"7"), (b"attempt", b"1")] for job_id in (b"a", b"b")
    ]


def test_no_ids_mean_no_entries(run: Run, client: redis.Redis, keys: Keys) -> None:
    run("add_events", [keys.events], 100, "active", 2, "ts", 7)

    assert not client.exists(keys.events)


def test_the_stream_is_trimmed_about_at_max_len(run: Run, client: redis.Redis, keys: Keys) -> None:
    run("add_events", [keys.events], 200, "active", 2, "ts", 7, *(f"j-{n}" for n in range(1000)))

    assert 200 <= client.xlen(keys.events) <= 400
    assert client.xrevrange(keys.events, count=1)[0][1][b"id"] == b"j-999"


def test_a_key_of_another_type_is_an_error_and_stays_as_it_is(run: Run, client: redis.Redis, keys: Keys) -> None:
    client.set(keys.events, "mine", ex=60)

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        run("add_events", [keys.events], 100, "active", 2, "ts", 7, "a")

    assert client.get(keys.events) == b"mine"
