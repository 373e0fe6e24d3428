"""add_unique: jobs with ids, each once while its marker lives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script
from tests.engine.seen import keys_of
from tests.lua.conftest import Run
from tests.support import eventually

ADDED, TAKEN, FULL = 1, 0, -1
TTL = 100
Job = tuple[str, int | str]  # id, run-at or "" for now


def arguments(keys: Keys, *jobs: Job, cap: int = 0, trim: int = 0, ttl: int = TTL) -> tuple[list[str], list[str | int]]:
    """Keys and arguments for jobs whose bytes are ``bytes of <id>`` and whose name is their id."""
    names, args = [keys.stream, keys.delayed], [cap, trim]
    for job_id, run_at in jobs:
        names += [keys.dedup(job_id), keys.delayed_index(job_id)]
        args += [run_at, ttl, f"bytes of {job_id}", job_id]
    return names, args


def add(run: Run, keys: Keys, *jobs: Job, **limits: int) -> list[int] | int:
    names, args = arguments(keys, *jobs, **limits)
    answer: list[int] | int = run("add_unique", names, *args)
    return answer


def in_stream(client: redis.Redis, keys: Keys) -> list[str]:
    return [fields[b"d"].decode().removeprefix("bytes of ") for _, fields in client.xrange(keys.stream)]


def in_delayed(client: redis.Redis, keys: Keys) -> dict[str, float]:
    entries = client.zrange(keys.delayed, 0, -1, withscores=True)
    return {member.decode().removeprefix("bytes of "): at for member, at in entries}


def test_an_immediate_job_goes_to_the_stream_with_a_marker(run: Run, client: redis.Redis, keys: Keys) -> None:
    assert add(run, keys, ("i", "")) == [ADDED]

    [(_, fields)] = client.xrange(keys.stream)
    assert list(fields.items()) == [(b"d", b"bytes of i"), (b"n", b"i")]
    assert client.get(keys.dedup("i")) == b"1"
    assert TTL - 5 <= client.ttl(keys.dedup("i")) <= TTL
    assert not client.exists(keys.delayed_index("i"), keys.delayed)


def test_an_unnamed_job_has_no_name_field(run: Run, client: redis.Redis, keys: Keys) -> None:
    names = [keys.stream, keys.delayed, keys.dedup("i"), keys.delayed_index("i")]
    assert run("add_unique", names, 0, 0, "", TTL, "e", "") == [ADDED]

    [(_, fields)] = client.xrange(keys.stream)
    assert fields == {b"d": b"e"}


def test_a_delayed_job_goes_to_the_set_with_marker_and_index(run: Run, client: redis.Redis, keys: Keys) -> None:
    assert add(run, keys, ("i", 1794979220540)) == [ADDED]

    assert in_delayed(client, keys) == {"i": 1794979220540}
    assert client.get(keys.delayed_index("i")) == b"bytes of i"
    assert client.ttl(keys.delayed_index("i")) == client.ttl(keys.dedup("i")) > TTL - 5
    assert not client.exists(keys.stream)


@pytest.mark.parametrize("first", ["", 5])
@pytest.mark.parametrize("second", ["", 5])
def test_an_id_is_taken_by_either_kind_for_either_kind(
    run: Run, client: redis.Redis, keys: Keys, first: int | str, second: int | str
) -> None:
    assert add(run, keys, ("i", first)) == [ADDED]
    assert add(run, keys, ("i", second)) == [TAKEN]

    assert len(in_stream(client, keys)) + len(in_delayed(client, keys)) == 1


def test_each_job_has_its_answer(run: Run, client: redis.Redis, keys: Keys) -> None:
    add(run, keys, ("b", ""), ("d", 5))

    answers = add(run, keys, ("a", ""), ("b", ""), ("c", 7), ("d", 7), ("a", ""), ("c", ""))

    assert answers == [ADDED, TAKEN, ADDED, TAKEN, TAKEN, TAKEN]
    assert in_stream(client, keys) == ["b", "a"]
    assert in_delayed(client, keys) == {"d": 5, "c": 7}


def test_a_repeated_call_adds_nothing_and_keeps_the_life_of_the_marker(
    run: Run, client: redis.Redis, keys: Keys
) -> None:
    add(run, keys, ("i", 5), ttl=50)

    assert add(run, keys, ("i", 5), ttl=5000) == [TAKEN]
    assert client.ttl(keys.dedup("i")) <= 50


def test_an_id_is_free_when_its_marker_has_gone(run: Run, client: redis.Redis, keys: Keys) -> None:
    add(run, keys, ("i", ""), ttl=1)

    eventually(lambda: not client.exists(keys.dedup("i")))

    assert add(run, keys, ("i", "")) == [ADDED]
    assert in_stream(client, keys) == ["i", "i"]


def test_a_full_stream_refuses_the_whole_call_and_nothing_is_written(run: Run, client: redis.Redis, keys: Keys) -> None:
    add(run, keys, ("a", ""), ("b", ""))
    before = keys_of(client, keys.queue)

    assert add(run, keys, ("c", 5), ("d", ""), cap=2) == FULL

    assert keys_of(client, keys.queue) == before
    assert in_stream(client, keys) == ["a", "b"]


def test_a_full_stream_does_not_refuse_what_is_not_for_it_or_in_already(
    run: Run, client: redis.Redis, keys: Keys
) -> None:
    add(run, keys, ("a", ""), ("b", ""))

    assert add(run, keys, ("a", ""), ("c", 5), ("b", ""), cap=2) == [TAKEN, ADDED, TAKEN]
    assert in_delayed(client, keys) == {"c": 5}


def test_one_call_may_overshoot_the_cap(run: Run, client: redis.Redis, keys: Keys) -> None:
    assert add(run, keys, ("a", ""), ("b", ""), ("c", ""), cap=1) == [ADDED] * 3


def test_trim_drops_the_oldest(run: Run, client: redis.Redis, keys: Keys) -> None:
    for n in range(0, 350, 50):
        add(run, keys, *((f"i{m}", "") for m in range(n, n + 50)), trim=100)

    assert 100 <= client.xlen(keys.stream) < 300
    assert in_stream(client, keys)[-1] == "i349"


@pytest.mark.parametrize("wrong", ["stream", "delayed"])
@pytest.mark.parametrize("run_at", ["", 5])
def test_nothing_is_written_where_either_key_has_another_type(
    run: Run, client: redis.Redis, keys: Keys, wrong: str, run_at: int | str
) -> None:
    client.set(getattr(keys, wrong), "something else")
    before = keys_of(client, keys.queue)

    with pytest.raises(redis.ResponseError, match=f"WRONGTYPE .*:{wrong} holds a string"):
        add(run, keys, ("i", run_at))

    assert keys_of(client, keys.queue) == before


def test_clients_that_race_for_ids_add_each_once(url: str, client: redis.Redis, keys: Keys) -> None:
    def race(shift: int) -> int:
        with redis.Redis.from_url(url) as mine:
            added = 0
            for n in range(100):
                job = f"i{(n + shift) % 100}"
                names, args = arguments(keys, (job, "" if (n + shift) % 2 else 5))
                added += mine.eval(script("add_unique").source, len(names), *names, *args)[0]
            return added

    with ThreadPoolExecutor(4) as threads:
        added = list(threads.map(race, [0, 25, 50, 75]))

    assert sum(added) == 100
    assert sorted([*in_stream(client, keys), *in_delayed(client, keys)]) == sorted(f"i{n}" for n in range(100))
