"""cancel_delayed: whoever removes the member has the job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script
from tests.engine.seen import keys_of
from tests.lua.conftest import Run

CANCELLED, NOT_THERE = 1, 0


def put(client: redis.Redis, keys: Keys, job_id: str) -> None:
    """A delayed job, as an add with an id leaves it."""
    client.zadd(keys.delayed, {f"member of {job_id}": 5})
    client.set(keys.dedup(job_id), "1", ex=100)
    client.set(keys.delayed_index(job_id), f"member of {job_id}", ex=100)


def names(keys: Keys, job_id: str) -> list[str]:
    return [keys.delayed, keys.delayed_index(job_id), keys.dedup(job_id)]


def test_it_takes_out_the_job_and_all_that_belongs_to_it(run: Run, client: redis.Redis, keys: Keys) -> None:
    put(client, keys, "i")

    assert run("cancel_delayed", names(keys, "i")) == CANCELLED
    assert keys_of(client, keys.queue) == []


def test_it_leaves_other_jobs_alone(run: Run, client: redis.Redis, keys: Keys) -> None:
    put(client, keys, "i")
    put(client, keys, "j")

    run("cancel_delayed", names(keys, "i"))

    assert client.zrange(keys.delayed, 0, -1) == [b"member of j"]
    assert client.exists(keys.dedup("j"), keys.delayed_index("j")) == 2


def test_a_job_that_was_never_there_is_not_there(run: Run, client: redis.Redis, keys: Keys) -> None:
    assert run("cancel_delayed", names(keys, "i")) == NOT_THERE
    assert keys_of(client, keys.queue) == []


def test_a_second_cancel_finds_nothing(run: Run, client: redis.Redis, keys: Keys) -> None:
    put(client, keys, "i")

    assert [run("cancel_delayed", names(keys, "i")) for _ in range(2)] == [CANCELLED, NOT_THERE]


def test_a_promoted_job_keeps_its_marker(run: Run, client: redis.Redis, keys: Keys) -> None:
    put(client, keys, "i")
    client.zrem(keys.delayed, "member of i")

    assert run("cancel_delayed", names(keys, "i")) == NOT_THERE
    assert client.exists(keys.dedup("i"), keys.delayed_index("i")) == 2


def test_a_marker_without_index_is_not_enough(run: Run, client: redis.Redis, keys: Keys) -> None:
    client.set(keys.dedup("i"), "1", ex=100)

    assert run("cancel_delayed", names(keys, "i")) == NOT_THERE
    assert client.exists(keys.dedup("i"))


def test_a_set_of_another_type_is_left_alone(run: Run, client: redis.Redis, keys: Keys) -> None:
    put(client, keys, "i")
    client.set(keys.delayed, "something else")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        run("cancel_delayed", names(keys, "i"))

    assert client.exists(keys.dedup("i"), keys.delayed_index("i")) == 2


def test_a_cancel_and_a_promotion_never_both_have_the_job(url: str, client: redis.Redis, keys: Keys) -> None:
    ids = [f"i{n}" for n in range(200)]
    for job_id in ids:
        put(client, keys, job_id)

    def cancel() -> set[str]:
        with redis.Redis.from_url(url) as mine:
            source = script("cancel_delayed").source
            return {i for i in ids if mine.eval(source, 3, *names(keys, i)) == CANCELLED}

    def promote() -> set[str]:
        with redis.Redis.from_url(url) as mine:
            return {i for i in reversed(ids) if mine.zrem(keys.delayed, f"member of {i}") == 1}

    with ThreadPoolExecutor(2) as threads:
        cancelling, promoting = threads.submit(cancel), threads.submit(promote)
        cancelled, promoted = cancelling.result(), promoting.result()

    assert cancelled | promoted == set(ids)
    assert cancelled & promoted == set()
