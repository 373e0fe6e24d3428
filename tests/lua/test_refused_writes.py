"""A script is no transaction: where the server refuses a write in the middle of it, the job must still be somewhere."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from chasqui.protocol.codec import encode_member
from chasqui.protocol.scripts import script
from tests.lua.worker_pending import GROUP, Pending

Run = Callable[..., Any]
LAST = f"{2**64 - 1}-{2**64 - 1}"


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Pending:
    return Pending(client, queue)


@pytest.fixture
def without(q: Pending, url: str) -> Iterator[Callable[[str], Run]]:
    """Runs scripts as a user who may do anything but one command."""
    with contextlib.ExitStack() as made:

        def user(command: str) -> Run:
            name = f"u-{uuid.uuid4().hex[:8]}"
            q.client.execute_command("ACL", "SETUSER", name, "on", ">pw", "~*", "+@all", f"-{command}")
            made.callback(q.client.execute_command, "ACL", "DELUSER", name)
            limited = made.enter_context(redis.Redis.from_url(url, username=name, password="pw", protocol=2))

            def run(what: str, keys: list[str], *args: Any) -> Any:
                return limited.eval(script(what).source, len(keys), *keys, *args)

            return run

        yield user


def fill_up(q: Pending, stream: str) -> None:
    """From now on nothing can be added to it: the last id there is, is taken."""
    q.client.xadd(stream, {"d": "last"}, id=LAST)
    q.client.xdel(stream, LAST)


def delay(q: Pending, envelope: str, at: int = 1) -> bytes:
    member = encode_member(b"", envelope.encode())
    q.client.zadd(q.keys.delayed, {member: at})
    return member


def test_a_retry_that_cannot_be_written_leaves_the_job_with_its_worker(
    q: Pending, without: Callable[[str], Run]
) -> None:
    (entry,) = q.taken("me", "a")

    with pytest.raises(redis.ResponseError):
        without("zadd")("retry_later", [q.keys.stream, q.keys.delayed], GROUP, "me", entry, 5, "member")

    assert (q.stream, q.pending) == (["a"], [(entry, "me", 1)])


@pytest.mark.parametrize("refused", ["xadd", "full"])
def test_a_dead_letter_that_cannot_be_written_leaves_the_job_with_its_worker(
    q: Pending, without: Callable[[str], Run], refused: str
) -> None:
    (entry,) = q.taken("me", "a")
    if refused == "full":
        fill_up(q, q.keys.dlq)

    with pytest.raises(redis.ResponseError):
        without("xadd" if refused == "xadd" else "flushall")(
            "dead_letter", [q.keys.stream, q.keys.dlq], GROUP, "me", 100, entry, "a", "", "why", "", ""
        )

    assert (q.stream, q.pending) == (["a"], [(entry, "me", 1)])


@pytest.mark.parametrize("refused", ["xack", "xdel"])
def test_what_cannot_be_taken_out_is_not_added_elsewhere(
    q: Pending, without: Callable[[str], Run], refused: str
) -> None:
    """Each new try would add it once more."""
    (entry,) = q.taken("me", "a")
    run = without(refused)

    with pytest.raises(redis.ResponseError):
        run("retry_later", [q.keys.stream, q.keys.delayed], GROUP, "me", entry, 5, "member")
    with pytest.raises(redis.ResponseError):
        run("dead_letter", [q.keys.stream, q.keys.dlq], GROUP, "me", 100, entry, "a", "", "why", "", "")

    assert (q.pending, q.delayed, q.dead) == ([(entry, "me", 1)], {}, [])


def test_what_cannot_be_taken_out_is_not_promoted_or_replayed(q: Pending, without: Callable[[str], Run]) -> None:
    member, letter = delay(q, "a"), q.client.xadd(q.keys.dlq, {"d": "a"})
    lock = [q.keys.delayed, q.keys.stream, q.keys.promoter_lock, q.keys.dlq]

    with pytest.raises(redis.ResponseError):
        without("zrem")("promote_due", lock, "me", 60_000, 100, 0, 0, 100, 1)
    with pytest.raises(redis.ResponseError):
        without("zrem")("promote_members", [q.keys.delayed, q.keys.stream], 0, 0, member)
    with pytest.raises(redis.ResponseError):
        without("xdel")("replay_dead_letters", [q.keys.dlq, q.keys.stream], 0, 0, letter, "a", "")

    assert q.stream == []


def test_a_repeat_spec_whose_next_fire_cannot_be_set_does_not_fire(q: Pending, without: Callable[[str], Run]) -> None:
    spec = q.keys.repeat_spec("k")
    q.client.set(q.keys.scheduler_lock, "me", px=60_000)
    q.client.zadd(q.keys.repeat, {"k": 5})
    q.client.hset(spec, "spec", b"stored")
    keys = [q.keys.scheduler_lock, q.keys.repeat, spec, q.keys.stream]
    args = ("me", "k", "5", hashlib.sha1(b"stored").hexdigest(), 0, 0, 0, 6, "", "", "envelope")

    with pytest.raises(redis.ResponseError):
        without("zadd")("fire_repeat", keys, *args)

    assert q.stream == []
    assert q.call("fire_repeat", keys, *args) == [1, 0]


def test_a_replay_that_cannot_be_written_leaves_the_dead_letter(q: Pending) -> None:
    letter = q.client.xadd(q.keys.dlq, {"d": "a"})
    fill_up(q, q.keys.stream)

    with pytest.raises(redis.ResponseError):
        q.call("replay_dead_letters", [q.keys.dlq, q.keys.stream], 0, 0, letter, "a", "")

    assert [entry for entry, _ in q.client.xrange(q.keys.dlq)] == [letter]


def promote(q: Pending) -> Any:
    keys = [q.keys.delayed, q.keys.stream, q.keys.promoter_lock, q.keys.dlq]
    return q.call("promote_due", keys, "me", 60_000, 100, 0, 0, 100, 1)


def promote_all(q: Pending) -> Any:
    return q.call("promote_members", [q.keys.delayed, q.keys.stream], 0, 0, *q.client.zrange(q.keys.delayed, 0, -1))


@pytest.mark.parametrize("move", [promote, promote_all])
def test_a_promotion_that_cannot_be_written_leaves_the_job_delayed(q: Pending, move: Callable[[Pending], Any]) -> None:
    member = delay(q, "a")
    fill_up(q, q.keys.stream)

    with pytest.raises(redis.ResponseError):
        move(q)

    assert q.client.zrange(q.keys.delayed, 0, -1) == [member]


@pytest.mark.parametrize("broken", ["type", "full"])
def test_a_member_that_has_nowhere_to_go_does_not_hold_up_the_jobs(q: Pending, broken: str) -> None:
    q.client.zadd(q.keys.delayed, {b"bad": 1})
    delay(q, "good", at=2)
    if broken == "type":
        q.client.set(q.keys.dlq, "mine", ex=60)
    else:
        fill_up(q, q.keys.dlq)

    assert promote(q)[:2] == [1, 1]
    assert (q.stream, q.client.zrange(q.keys.delayed, 0, -1)) == (["good"], [b"bad"])

    with pytest.raises(redis.ResponseError, match="WRONGTYPE" if broken == "type" else "exhausted|smaller"):
        promote(q)


def test_what_was_promoted_before_a_refused_job_is_promoted_once(q: Pending) -> None:
    q.client.xadd(q.keys.stream, {"d": "there"}, id=f"{2**64 - 1}-{2**64 - 2}")
    first, second = delay(q, "first", at=1), delay(q, "second", at=2)

    assert promote(q)[:3] == [1, 1, 1]
    with pytest.raises(redis.ResponseError):
        promote(q)

    assert (q.stream, q.client.zrange(q.keys.delayed, 0, -1)) == (["there", "first"], [second])
    assert first != second


@pytest.mark.parametrize("run_at", ["", 5], ids=["now", "delayed"])
def test_an_id_whose_job_could_not_be_added_is_free_again(
    q: Pending, without: Callable[[str], Run], run_at: int | str
) -> None:
    names = [q.keys.stream, q.keys.delayed, q.keys.dedup("i"), q.keys.delayed_index("i")]

    with pytest.raises(redis.ResponseError):
        without("zadd" if run_at else "xadd")("add_unique", names, 0, 0, run_at, 100, "bytes", "")

    assert q.call("add_unique", names, 0, 0, run_at, 100, "bytes", "") == [1]
    assert q.client.xlen(q.keys.stream) + q.client.zcard(q.keys.delayed) == 1


def test_a_repeat_spec_that_cannot_be_put_in_the_set_is_not_half_there(
    q: Pending, without: Callable[[str], Run]
) -> None:
    """A key in the set without bytes would be taken for a broken spec, and end among the dead letters."""
    spec = q.keys.repeat_spec("k")

    with pytest.raises(redis.ResponseError):
        without("hset")("upsert_repeat", [q.keys.repeat, spec], 5, "k", b"stored", "")

    assert not q.client.exists(q.keys.repeat, spec)
