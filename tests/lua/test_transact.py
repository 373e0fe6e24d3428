"""The scripts of exactly-once adds: every word they answer with, and what they leave alone."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import redis

from chasqui.protocol.keys import AppKeys, Keys
from tests.engine.seen import keys_of
from tests.lua.conftest import Run

M1, M2 = "manifest-1", "manifest-2"
TTL = 100_000
LIMIT, NO_CAP, NO_TRIM, DLQ_LEN = 1000, 0, 0, 100


class Txn:
    """One writer and one queue, by the scripts' own arguments."""

    def __init__(self, run: Run, client: redis.Redis, keys: Keys) -> None:
        self.run, self.client, self.keys = run, client, keys
        self.app = AppKeys(f"{keys.queue}-app")
        self.ledger = keys.ledger(self.app.app_id)

    def begin(self, version: int, manifest: str = M1, pieces: int = 1, by: str = "") -> list[Any]:
        key = self.app.manifest(manifest)
        for n in range(pieces):
            self.client.hset(key, str(n), "piece")
            self.client.expire(key, 100)
        self.client.sadd(self.app.queues, self.keys.queue)
        self.client.expire(self.app.queues, 100)
        return words(self.run("begin_version", [self.app.home, key, self.app.queues], version, manifest, pieces, by))

    def stage(self, name: str, *blocks: list[Any]) -> str:
        key = self.keys.stage(name)
        for n, block in enumerate(blocks):
            self.client.hset(key, str(n), msgpack.packb(block, use_bin_type=False))
        self.client.expire(key, 100)
        return key

    def adopt(self, version: int, manifest: str, *stages: tuple[str, int], first: int = 0, of: int = 1) -> list[Any]:
        names = [self.keys.stage(name) for name, _ in stages]
        args = [version, manifest, first, of, 10, *(blocks for _, blocks in stages)]
        return words(self.run("adopt_stages", [self.ledger, *names], *args))

    def home(self, name: str, version: int, manifest: str = M1, *more: int, keys: int = 1) -> Any:
        names = [self.app.home, self.app.manifest(manifest), self.app.queues][:keys]
        answer = self.run(name, names, version, manifest, *more)
        return answer.decode() if isinstance(answer, bytes) else answer

    def publish(self, version: int, manifest: str, stage: str, blocks: int, place: int = 0, **limits: int) -> list[Any]:
        names = [self.ledger, self.keys.stage(stage), self.keys.stream, self.keys.delayed, self.keys.dlq]
        rest = [limits.get("limit", LIMIT), limits.get("cap", NO_CAP), limits.get("trim", NO_TRIM), DLQ_LEN]
        return words(self.run("publish_slice", names, version, manifest, place, blocks, *rest))

    def opened(self, *blocks: list[Any], version: int = 1) -> None:
        """A version with one stage, ready to be published."""
        self.stage("s", *blocks)
        assert self.adopt(version, M1, ("s", len(blocks))) == ["adopted", 1]

    def envelopes(self) -> list[bytes]:
        return [fields[b"d"] for _, fields in self.client.xrange(self.keys.stream)]


def words(reply: list[Any]) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in reply]


@pytest.fixture
def txn(run: Run, client: redis.Redis, keys: Keys) -> Any:
    made = Txn(run, client, keys)
    yield made
    for key in [
        *client.scan_iter(match=f"{made.app.prefix}*"),
        made.ledger,
        *client.scan_iter(match=f"{keys.prefix}:st*"),
    ]:
        client.delete(key)


# --- At home -------------------------------------------------------------------------------------------------------


def test_the_first_manifest_of_a_version_wins(txn: Txn) -> None:
    assert txn.begin(5, M1, by="a") == ["ours", "5", "staged", M1, "a"]
    assert txn.begin(5, M1, by="a") == ["ours", "5", "staged", M1, "a"]
    assert txn.begin(5, M2, by="b") == ["other", "5", "staged", M1, "a"]
    assert txn.client.ttl(txn.app.home) == txn.client.ttl(txn.app.manifest(M1)) == -1


def test_versions_are_compared_as_numbers(txn: Txn) -> None:
    txn.begin(10)
    assert txn.begin(9)[0] == "ahead"
    assert txn.begin(11, M2)[0] == "unfinished"


def test_a_manifest_that_is_not_whole_is_not_registered(txn: Txn) -> None:
    answer = txn.run("begin_version", [txn.app.home, txn.app.manifest(M1), txn.app.queues], 1, M1, 2, "")

    assert words(answer)[0] == "torn"
    assert not txn.client.exists(txn.app.home)


def test_a_closed_version_is_done_and_the_next_waits_for_its_manifest_to_go(txn: Txn) -> None:
    txn.begin(5)
    assert txn.home("close_version", 5, M1, TTL, keys=3) == 0
    assert txn.home("decide_version", 5) == "open"
    assert txn.home("close_version", 5, M1, TTL, keys=3) == 1
    assert txn.home("close_version", 5, M1, TTL, keys=3) == 1
    assert txn.begin(5, M2)[0] == "done"
    assert txn.begin(6, M2)[0] == "unfinished"

    assert txn.home("drop_manifest", 5, M1, keys=2) == 1
    assert txn.home("drop_manifest", 5, M1, keys=2) == 0

    assert 90 < txn.client.ttl(txn.app.home) <= 100
    assert txn.begin(6, M2)[0] == "ours"
    assert txn.client.ttl(txn.app.home) == -1


def test_a_version_is_either_opened_or_withdrawn(txn: Txn) -> None:
    txn.begin(5)
    assert txn.home("withdraw_version", 5) == "withdrawn"
    assert txn.home("decide_version", 5) == "withdrawn"
    assert txn.begin(5, M2) == ["other", "5", "withdrawn", M1, ""]
    assert txn.home("forget_version", 5, M1, TTL, keys=3) == 1
    assert txn.home("forget_version", 5, M1, TTL, keys=3) == 0
    assert not txn.client.exists(txn.app.home, txn.app.manifest(M1))

    txn.begin(5, M2)
    assert txn.home("decide_version", 5, M2) == "open"
    assert txn.home("withdraw_version", 5, M2) == "open"
    assert txn.home("withdraw_version", 5, M1) == txn.home("decide_version", 4, M2) == "gone"


def test_a_withdrawal_goes_back_to_the_version_before(txn: Txn) -> None:
    txn.begin(5)
    txn.home("decide_version", 5)
    txn.home("close_version", 5, M1, TTL, keys=3)
    txn.home("drop_manifest", 5, M1, keys=2)
    txn.begin(6, M2)
    txn.home("withdraw_version", 6, M2)

    assert txn.home("forget_version", 6, M2, TTL, keys=3) == 1

    assert txn.client.hgetall(txn.app.home) == {b"version": b"5", b"state": b"done", b"done": b"5", b"by": b""}
    assert txn.begin(5, M1)[0] == "done"


def test_home_of_another_type_is_refused(txn: Txn) -> None:
    txn.client.set(txn.app.home, "something else")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        txn.begin(1)


# --- Adopting ------------------------------------------------------------------------------------------------------


def test_stages_are_adopted_slice_by_slice_and_then_do_not_expire(txn: Txn) -> None:
    first, second = txn.stage("a", ["same", "n", "1"]), txn.stage("b", ["same", "n", "2"], ["same", "n", "3"])

    assert txn.adopt(1, M1, ("a", 1), of=2) == ["adopted", 1]
    assert txn.adopt(1, M1, ("a", 1), of=2) == ["adopted", 1]
    assert txn.publish(1, M1, "a", 1)[0] == "foreign"
    assert txn.adopt(1, M1, ("b", 2), first=1, of=2) == ["adopted", 2]
    assert txn.adopt(1, M1, ("a", 1), of=2) == ["adopted", 2]

    assert txn.client.ttl(first) == txn.client.ttl(second) == txn.client.ttl(txn.ledger) == -1
    assert txn.client.hget(txn.ledger, "state") == b"open"


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_stage_with_other_blocks_than_it_should_have_is_expired(txn: Txn, blocks: int) -> None:
    whole, part = txn.stage("a", ["same", "n", "1"]), txn.stage("b", ["same", "n", "2"], ["same", "n", "3"])

    assert txn.adopt(1, M1, ("a", 1), ("b", blocks), of=2) == ["expired", 1]

    assert txn.client.ttl(whole) > 0
    assert txn.client.ttl(part) > 0
    assert not txn.client.exists(txn.ledger)


def test_a_ledger_with_another_version_or_manifest_is_not_taken_over(txn: Txn) -> None:
    txn.opened(["same", "n", "1"], version=5)
    txn.stage("t", ["same", "n", "2"])

    assert txn.adopt(4, M2, ("t", 1)) == ["ahead", 5]
    assert txn.adopt(5, M2, ("t", 1)) == ["unfinished", 5]
    assert txn.adopt(6, M2, ("t", 1)) == ["unfinished", 5]
    txn.publish(5, M1, "s", 1)
    assert txn.adopt(5, M2, ("t", 1)) == ["done", 5]
    assert txn.adopt(6, M2, ("t", 1)) == ["adopted", 1]


def test_releasing_deletes_stages_and_their_ledger_unless_some_is_published(txn: Txn, client: redis.Redis) -> None:
    txn.opened(["same", "n", "1", "2"])
    stage = txn.keys.stage("s")
    assert txn.run("release_stages", [txn.ledger, stage], M1, 1) == 1
    assert not client.exists(stage, txn.ledger)

    txn.opened(["same", "n", "1", "2"])
    txn.publish(1, M1, "s", 1, limit=1)
    assert txn.run("release_stages", [txn.ledger, stage], M1, 1) == 0
    assert client.exists(stage, txn.ledger) == 2


# --- Publishing ----------------------------------------------------------------------------------------------------


def test_each_call_moves_the_next_jobs_and_the_last_one_says_done(txn: Txn) -> None:
    txn.opened(["same", "n", "1", "2", "3"], ["named", "a", "4", "", "5"])

    assert txn.publish(1, M1, "s", 2, limit=2)[:3] == ["moved", 0, 2]
    assert txn.publish(1, M1, "s", 2, limit=2)[:3] == ["moved", 0, 3]
    assert txn.client.hlen(txn.keys.stage("s")) == 1
    assert txn.publish(1, M1, "s", 2)[:3] == ["done", 1, 5]
    assert txn.publish(1, M1, "s", 2)[:3] == ["done", 1, 5]

    entries = [(fields[b"d"], fields.get(b"n")) for _, fields in txn.client.xrange(txn.keys.stream)]
    assert entries == [(b"1", b"n"), (b"2", b"n"), (b"3", b"n"), (b"4", b"a"), (b"5", None)]
    assert not txn.client.exists(txn.keys.stage("s"))


def test_an_unnamed_job_for_now_has_no_name_field_and_one_for_later_goes_to_the_set(txn: Txn) -> None:
    txn.opened(["same", "", "1"], ["later", "1794979220540", "member"], ["dead", "bytes", "", "malformed", "why"])
    for _ in range(3):
        txn.publish(1, M1, "s", 3)

    [(_, job)] = txn.client.xrange(txn.keys.stream)
    [(_, letter)] = txn.client.xrange(txn.keys.dlq)
    assert job == {b"d": b"1"}
    assert txn.client.zrange(txn.keys.delayed, 0, -1, withscores=True) == [(b"member", 1794979220540)]
    assert letter == {b"d": b"bytes", b"source_id": b"", b"reason": b"malformed", b"detail": b"why"}


def test_another_version_another_manifest_and_another_stage_move_nothing(txn: Txn) -> None:
    txn.opened(["same", "n", "1"])

    assert txn.publish(2, M1, "s", 1)[0] == "foreign"
    assert txn.publish(1, M2, "s", 1)[0] == "foreign"
    assert txn.publish(1, M1, "s", 1, place=1)[:2] == ["elsewhere", 0]

    assert txn.envelopes() == []


def test_a_stage_that_is_gone_or_has_lost_a_block_is_an_error(txn: Txn) -> None:
    txn.opened(["same", "n", "1"], ["same", "n", "2"])
    txn.client.hdel(txn.keys.stage("s"), "1")
    assert txn.publish(1, M1, "s", 2)[0] == "lost"
    txn.client.delete(txn.keys.stage("s"))
    assert txn.publish(1, M1, "s", 2)[0] == "lost"

    assert txn.envelopes() == []


def test_no_more_jobs_are_moved_than_fit(txn: Txn) -> None:
    txn.opened(["same", "n", *map(str, range(10))])

    assert txn.publish(1, M1, "s", 1, cap=4)[:3] == ["moved", 0, 4]
    assert txn.publish(1, M1, "s", 1, cap=4)[:3] == ["full", 0, 4]
    assert txn.publish(1, M1, "s", 1, cap=6)[:3] == ["moved", 0, 6]
    assert txn.publish(1, M1, "s", 1)[:3] == ["done", 1, 10]


def test_a_full_stream_does_not_hold_up_jobs_for_later(txn: Txn) -> None:
    txn.client.xadd(txn.keys.stream, {"d": "x"})
    txn.opened(["later", "5", "member"])

    assert txn.publish(1, M1, "s", 1, cap=1)[0] == "done"


@pytest.mark.parametrize("wrong", ["stream", "delayed", "dlq"])
def test_nothing_is_moved_where_a_key_has_another_type(txn: Txn, wrong: str) -> None:
    txn.opened(["same", "n", "1"])
    txn.client.set(getattr(txn.keys, wrong), "something else")
    before = txn.client.hgetall(txn.ledger)

    with pytest.raises(redis.ResponseError, match=f"WRONGTYPE .*:{wrong} holds a string"):
        txn.publish(1, M1, "s", 1)

    assert txn.client.hgetall(txn.ledger) == before
    txn.client.delete(getattr(txn.keys, wrong))


def test_a_write_that_the_server_refuses_leaves_the_cursor_behind_what_is_in(txn: Txn) -> None:
    """A stream whose last id is the largest there is takes no more entries."""
    txn.opened(["same", "n", "1", "2", "3"])
    top = 2**64 - 1
    txn.client.xadd(txn.keys.stream, {"d": "x"}, id=f"{top}-{top - 2}")

    with pytest.raises(redis.ResponseError):
        txn.publish(1, M1, "s", 1)

    assert len(txn.envelopes()) - 1 == int(txn.client.hget(txn.ledger, "published") or -1)
    txn.client.delete(txn.keys.stream)
    assert txn.publish(1, M1, "s", 1)[0] == "done"


# --- With ids ------------------------------------------------------------------------------------------------------


def publish_unique(txn: Txn, ids: list[str], first: int = 0, **limits: int) -> list[Any]:
    names = [txn.ledger, txn.keys.stage("s"), txn.keys.stream, txn.keys.delayed]
    for job_id in ids:
        names += [txn.keys.dedup(job_id), txn.keys.delayed_index(job_id)]
    rest = [limits.get("cap", NO_CAP), limits.get("trim", NO_TRIM)]
    return words(txn.run("publish_unique_slice", names, 1, M1, 0, 1, 0, first, *rest))


def unique(*jobs: tuple[str, str, str]) -> list[str]:
    """A block of jobs, each an id, a run-at and a TTL."""
    return ["unique", *(part for i, at, ttl in jobs for part in (i, at, ttl, f"bytes of {i}", "n"))]


def test_a_block_with_ids_is_left_to_the_script_that_knows_their_keys(txn: Txn) -> None:
    txn.opened(unique(("a", "", "50")))

    assert txn.publish(1, M1, "s", 1)[:1] == ["unique"]
    assert txn.publish(1, M1, "s", 1)[4:] == [0, 0]
    assert txn.envelopes() == []


def test_taken_ids_are_passed_over_and_made_ones_leave_no_marker(txn: Txn) -> None:
    txn.client.set(txn.keys.dedup("a"), 1, ex=50)
    txn.opened(unique(("a", "", "50"), ("b", "", "50"), ("b", "", "50"), ("c", "", "0"), ("d", "7", "60")))

    assert publish_unique(txn, ["a", "b", "b", "c", "d"])[:3] == ["done", 1, 5]

    assert txn.envelopes() == [b"bytes of b", b"bytes of c"]
    assert txn.client.zrange(txn.keys.delayed, 0, -1) == [b"bytes of d"]
    assert txn.client.get(txn.keys.delayed_index("d")) == b"bytes of d"
    assert not txn.client.exists(txn.keys.dedup("c"))
    assert 40 < txn.client.ttl(txn.keys.dedup("b")) <= 50


def test_a_slice_that_is_not_at_the_cursor_moves_nothing(txn: Txn) -> None:
    txn.opened(unique(("a", "", "50"), ("b", "", "50")))
    assert publish_unique(txn, ["a"])[:3] == ["moved", 0, 1]

    assert publish_unique(txn, ["a"])[0] == "elsewhere"
    assert publish_unique(txn, ["b"], first=1)[0] == "done"
    assert txn.envelopes() == [b"bytes of a", b"bytes of b"]


def test_ids_at_the_cap_stop_at_the_first_that_does_not_fit(txn: Txn) -> None:
    txn.opened(unique(("a", "", "50"), ("b", "", "50"), ("c", "5", "50")))

    assert publish_unique(txn, ["a", "b", "c"], cap=1)[:3] == ["moved", 0, 1]
    assert publish_unique(txn, ["b", "c"], first=1, cap=1)[:3] == ["full", 0, 1]
    assert not txn.client.exists(txn.keys.dedup("b"))


# --- Afterwards ----------------------------------------------------------------------------------------------------


def test_a_ledger_expires_only_when_it_is_done_and_still_of_that_version(txn: Txn) -> None:
    txn.opened(["same", "n", "1"])
    assert txn.run("retire_ledger", [txn.ledger], 1, TTL) == 0
    txn.publish(1, M1, "s", 1)
    assert txn.run("retire_ledger", [txn.ledger], 2, TTL) == 0
    assert txn.client.ttl(txn.ledger) == -1

    assert txn.run("retire_ledger", [txn.ledger], 1, TTL) == 1

    assert 90 < txn.client.ttl(txn.ledger) <= 100
    assert keys_of(txn.client, txn.keys.queue) == sorted([txn.ledger, txn.keys.stream])
