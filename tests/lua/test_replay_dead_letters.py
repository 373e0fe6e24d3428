"""replay_dead_letters: only the XDEL that removed the letter adds the job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script
from tests.lua.conftest import Run


def put(client: redis.Redis, keys: Keys, count: int) -> list[str]:
    """Dead letters 1-1, 2-1, ..."""
    ids = [f"{n + 1}-1" for n in range(count)]
    for letter in ids:
        client.xadd(keys.dlq, {"d": letter}, id=letter)
    return ids


def triples(ids: list[str]) -> list[str]:
    """For each letter: its id, the new envelope, a name for every second one."""
    return [part for i, letter in enumerate(ids) for part in (letter, f"new {letter}", "n" if i % 2 else "")]


def replay(run: Run, keys: Keys, ids: list[str], *, cap: int = 0, trim: int = 0) -> list[int]:
    answer: list[int] = run("replay_dead_letters", [keys.dlq, keys.stream], cap, trim, *triples(ids))
    return answer


def in_stream(client: redis.Redis, keys: Keys) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in client.xrange(keys.stream)]


def test_it_moves_letters_in_order_with_the_new_bytes(run: Run, client: redis.Redis, keys: Keys) -> None:
    ids = put(client, keys, 3)

    assert replay(run, keys, ids) == [3, 0]

    assert in_stream(client, keys) == [{b"d": b"new 1-1"}, {b"d": b"new 2-1", b"n": b"n"}, {b"d": b"new 3-1"}]
    assert client.xlen(keys.dlq) == 0


def test_it_moves_nothing_that_is_not_there(run: Run, client: redis.Redis, keys: Keys) -> None:
    ids = put(client, keys, 3)
    client.xdel(keys.dlq, "2-1")

    assert replay(run, keys, [*ids, "9-9"]) == [2, 0]
    assert [fields[b"d"] for fields in in_stream(client, keys)] == [b"new 1-1", b"new 3-1"]


def test_a_repeated_call_moves_nothing(run: Run, client: redis.Redis, keys: Keys) -> None:
    ids = put(client, keys, 3)

    assert [replay(run, keys, ids), replay(run, keys, [*ids, *ids])] == [[3, 0], [0, 0]]
    assert client.xlen(keys.stream) == 3


def test_without_letters_there_is_nothing_to_do(run: Run, client: redis.Redis, keys: Keys) -> None:
    assert replay(run, keys, []) == [0, 0]
    assert replay(run, keys, ["1-1"]) == [0, 0]
    assert not client.exists(keys.stream, keys.dlq)


def test_it_stops_at_the_cap_and_says_so(run: Run, client: redis.Redis, keys: Keys) -> None:
    ids = put(client, keys, 5)
    client.xadd(keys.stream, {"d": "waiting"})

    assert replay(run, keys, ids, cap=3) == [2, 1]
    assert client.xlen(keys.stream) == 3
    assert [letter for letter, _ in client.xrange(keys.dlq)] == [b"3-1", b"4-1", b"5-1"]
    assert replay(run, keys, ids, cap=3) == [0, 1]


def test_it_does_not_stop_when_the_last_letter_reaches_the_cap(run: Run, client: redis.Redis, keys: Keys) -> None:
    ids = put(client, keys, 3)

    assert replay(run, keys, ids, cap=3) == [3, 0]


def test_trim_drops_the_oldest_of_the_stream(run: Run, client: redis.Redis, keys: Keys) -> None:
    ids = put(client, keys, 350)

    assert replay(run, keys, ids, trim=100) == [350, 0]
    assert 100 <= client.xlen(keys.stream) < 300
    assert in_stream(client, keys)[-1][b"d"] == b"new 350-1"


@pytest.mark.parametrize("wrong", ["dlq", "stream"])
def test_nothing_is_moved_where_either_key_has_another_type(
    run: Run, client: redis.Redis, keys: Keys, wrong: str
) -> None:
    ids = put(client, keys, 3)
    client.delete(getattr(keys, wrong))
    client.set(getattr(keys, wrong), "something else")

    with pytest.raises(redis.ResponseError, match=f"WRONGTYPE .*:{wrong} holds a string"):
        replay(run, keys, ids)

    assert client.get(getattr(keys, wrong)) == b"something else"
    assert wrong == "dlq" or client.xlen(keys.dlq) == 3


def test_two_replays_at_once_move_each_letter_once(url: str, client: redis.Redis, keys: Keys) -> None:
    ids = put(client, keys, 200)

    def race(order: int) -> int:
        with redis.Redis.from_url(url) as mine:
            source = script("replay_dead_letters").source
            return sum(
                mine.eval(source, 2, keys.dlq, keys.stream, 0, 0, *triples([letter]))[0] for letter in ids[::order]
            )

    with ThreadPoolExecutor(2) as threads:
        moved = list(threads.map(race, [1, -1]))

    assert sum(moved) == 200
    assert sorted(fields[b"d"] for fields in in_stream(client, keys)) == sorted(f"new {i}".encode() for i in ids)
