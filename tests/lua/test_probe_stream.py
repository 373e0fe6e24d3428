"""probe_stream: the nearest entries of a guess, and how densely they stand."""

from __future__ import annotations

from typing import Any

import redis

from chasqui.protocol.keys import Keys
from tests.lua.conftest import Run


def fill(client: redis.Redis, keys: Keys, *ids: str) -> None:
    pipe = client.pipeline(transaction=False)
    for entry_id in ids:
        pipe.execute_command("XADD", keys.stream, entry_id, "d", "x")
    pipe.execute()


def probe(run: Run, keys: Keys, *guesses: str) -> Any:
    return run("probe_stream", [keys.stream], "0-1", "9999-0", *guesses)


def test_a_guess_in_a_gap_tells_both_its_ends(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, "1-0", "2-0", "3-0", "100-0", "102-0")

    assert probe(run, keys, "50-0") == [[b"3-0", b"1-0", 2, b"100-0", b"102-0", 1]]


def test_outside_of_all_entries_one_side_is_empty(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, "5-0", "7-0")

    first, last = probe(run, keys, "1-0", "9-0")

    assert first == [b"", b"", 0, b"5-0", b"7-0", 1]
    assert last == [b"7-0", b"5-0", 1, b"", b"", 0]


def test_a_window_looks_at_two_dozen_entries(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, *(f"{i}-0" for i in range(1, 101)))

    assert probe(run, keys, "50-0") == [[b"49-0", b"26-0", 23, b"50-0", b"73-0", 23]]


def test_inside_one_millisecond_the_numbers_count(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, *(f"{ms}-{i}" for ms in range(1, 10) for i in range(200)))

    (found,) = probe(run, keys, "5-100")

    assert found == [b"5-99", b"3-199", 100 + 200, b"5-100", b"7-0", 100 + 200]


def test_a_stream_of_one_millisecond_is_counted_to_its_ends(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, *(f"5-{i}" for i in range(200)))

    assert probe(run, keys, "5-0") == [[b"", b"", 0, b"5-0", b"5-199", 200]]


def test_a_missing_stream_is_empty(run: Run, keys: Keys) -> None:
    assert probe(run, keys, "5-0") == [[b"", b"", 0, b"", b"", 0]]


def test_looking_back_from_the_beginning_does_not_walk_the_stream(run: Run, client: redis.Redis, keys: Keys) -> None:
    fill(client, keys, *(f"{i}-0" for i in range(1, 20_001)))
    client.config_resetstat()

    assert probe(run, keys, "0-1")[0][3] == b"1-0"

    assert "cmdstat_xrevrange" not in client.info("commandstats")
