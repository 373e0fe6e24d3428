"""promote_members: whoever removes the member has the job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from chasqui.protocol.codec import encode_member
from chasqui.protocol.keys import Keys
from tests.lua.conftest import Run

MOVED, NOT_THERE, FULL = 1, 0, -1


def member(client: redis.Redis, keys: Keys, name: bytes, envelope: bytes) -> bytes:
    found = encode_member(name, envelope)
    client.zadd(keys.delayed, {found: 5})
    return found


def test_it_moves_chosen_members_with_their_names_and_leaves_the_others(
    run: Run, client: redis.Redis, keys: Keys
) -> None:
    named, unnamed = member(client, keys, b"n", b"one"), member(client, keys, b"", b"two")
    other = member(client, keys, b"", b"three")

    assert run("promote_members", [keys.delayed, keys.stream], 0, 0, named, unnamed) == [MOVED, MOVED]
    assert [fields for _, fields in client.xrange(keys.stream)] == [{b"d": b"one", b"n": b"n"}, {b"d": b"two"}]
    assert client.zrange(keys.delayed, 0, -1) == [other]


def test_what_is_gone_or_no_member_is_not_moved(run: Run, client: redis.Redis, keys: Keys) -> None:
    client.zadd(keys.delayed, {b"\xff\xff\xff\xffxx": 5, b"x": 6})

    answer = run(
        "promote_members", [keys.delayed, keys.stream], 0, 0, encode_member(b"", b"e"), b"\xff\xff\xff\xffxx", b"x"
    )

    assert answer == [NOT_THERE, NOT_THERE, NOT_THERE]
    assert client.zcard(keys.delayed) == 2
    assert client.exists(keys.stream) == 0


def test_at_the_cap_the_rest_stays_delayed(run: Run, client: redis.Redis, keys: Keys) -> None:
    members = [member(client, keys, b"", b"%d" % i) for i in range(3)]

    assert run("promote_members", [keys.delayed, keys.stream], 2, 0, *members) == [MOVED, MOVED, FULL]
    assert client.zrange(keys.delayed, 0, -1) == [members[2]]


@pytest.mark.parametrize("which", ["delayed", "stream"])
def test_a_key_of_another_type_is_refused_before_anything_is_written(
    run: Run, client: redis.Redis, keys: Keys, which: str
) -> None:
    found = member(client, keys, b"", b"e") if which == "stream" else encode_member(b"", b"e")
    client.set(getattr(keys, which), "text")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        run("promote_members", [keys.delayed, keys.stream], 0, 0, found)
    assert client.exists(keys.delayed, keys.stream) == (2 if which == "stream" else 1)


def test_two_at_a_time_move_a_member_once(run: Run, client: redis.Redis, keys: Keys) -> None:
    members = [member(client, keys, b"", b"%d" % i) for i in range(50)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda _: run("promote_members", [keys.delayed, keys.stream], 0, 0, *members), range(4))
        )

    assert sum(answer.count(MOVED) for answer in answers) == 50
    assert client.xlen(keys.stream) == 50
