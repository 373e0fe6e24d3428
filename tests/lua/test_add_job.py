"""add_job: one job, unless the stream is full."""

from __future__ import annotations

import pytest
import redis

from chasqui.protocol.keys import Keys
from tests.lua.conftest import Run

ADDED, FULL = 1, -1


def test_it_adds_envelope_and_name(run: Run, client: redis.Redis, keys: Keys) -> None:
    assert run("add_job", [keys.stream], 0, 0, b"\x94 envelope", "ñ") == ADDED

    [(_, fields)] = client.xrange(keys.stream)
    assert list(fields.items()) == [(b"d", b"\x94 envelope"), (b"n", "ñ".encode())]


def test_an_empty_name_is_no_field(run: Run, client: redis.Redis, keys: Keys) -> None:
    assert run("add_job", [keys.stream], 0, 0, "e", "") == ADDED

    [(_, fields)] = client.xrange(keys.stream)
    assert fields == {b"d": b"e"}


def test_it_adds_up_to_the_cap_and_not_one_more(run: Run, client: redis.Redis, keys: Keys) -> None:
    answers = [run("add_job", [keys.stream], 3, 0, f"e{n}", "") for n in range(5)]

    assert answers == [ADDED, ADDED, ADDED, FULL, FULL]
    assert [fields[b"d"] for _, fields in client.xrange(keys.stream)] == [b"e0", b"e1", b"e2"]


def test_a_cap_of_zero_is_none(run: Run, client: redis.Redis, keys: Keys) -> None:
    for n in range(5):
        assert run("add_job", [keys.stream], 0, 0, f"e{n}", "") == ADDED

    assert client.xlen(keys.stream) == 5


def test_trim_drops_the_oldest(run: Run, client: redis.Redis, keys: Keys) -> None:
    for n in range(350):
        run("add_job", [keys.stream], 0, 100, f"e{n}", "n")

    left = [fields[b"d"] for _, fields in client.xrange(keys.stream)]
    assert 100 <= len(left) < 300
    assert left[-1] == b"e349"


@pytest.mark.parametrize(("cap", "trim"), [(0, 0), (5, 0), (0, 5)])
def test_a_key_of_another_type_is_left_alone(run: Run, client: redis.Redis, keys: Keys, cap: int, trim: int) -> None:
    client.set(keys.stream, "something else")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        run("add_job", [keys.stream], cap, trim, "e", "")

    assert client.get(keys.stream) == b"something else"
