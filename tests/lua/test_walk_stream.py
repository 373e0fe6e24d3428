"""walk_stream: counts along a stream, bounded by entries and by bytes, and tells ids only."""

from __future__ import annotations

import redis

from chasqui.protocol.keys import Keys
from tests.lua.conftest import Run


def fill(client: redis.Redis, keys: Keys, count: int, size: int = 1) -> None:
    pipe = client.pipeline(transaction=False)
    for i in range(1, count + 1):
        pipe.execute_command("XADD", keys.stream, f"{i}-0", "d", b"x" * size)
    pipe.execute()


def test_it_tells_how_far_a_number_of_entries_reaches(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, 20)

    assert run("walk_stream", [keys.stream], "5-0", "+", 10, 9999, 4, 0) == [10, 20, b"15-0", [b"9-0", b"13-0"]]


def test_marks_go_on_where_the_call_before_stopped(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, 10)

    assert run("walk_stream", [keys.stream], "3-0", "+", 10, 9999, 4, 3)[3] == [b"4-0", b"8-0"]


def test_it_stops_with_the_entry_that_fills_the_bytes(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, 10, size=99)

    assert run("walk_stream", [keys.stream], "0-0", "+", 10, 250, 1000, 0) == [3, 300, b"3-0", []]


def test_it_goes_no_further_than_told_and_says_so_when_nothing_is_there(
    run: Run, client: redis.Redis, keys: Keys
) -> None:
    assert run("walk_stream", [keys.stream], "0-0", "+", 10, 999, 1, 0) == [0, 0, b"", []]
    fill(client, keys, 10)
    assert run("walk_stream", [keys.stream], "0-0", "3-0", 10, 999, 1000, 0) == [3, 6, b"3-0", []]
    assert run("walk_stream", [keys.stream], "10-0", "+", 10, 999, 1000, 0) == [0, 0, b"", []]


def test_no_call_walks_more_than_a_thousand_entries_or_a_megabyte(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, 1500)
    assert run("walk_stream", [keys.stream], "0-0", "+", 99_999, 2**40, 1000, 0)[0] == 1000
    client.delete(keys.stream)
    fill(client, keys, 12, size=200_000)

    walked, size, _, _ = run("walk_stream", [keys.stream], "0-0", "+", 99_999, 2**40, 1000, 0)
    assert walked == 6
    assert size < 2**20 + 200_002
