"""The scripts of repeatable jobs: every answer they give, and every race they claim to close."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script

AT = 1_794_978_620_538
BLOB = b"\x98 stored bytes"
FULL, CHANGED, NOT_LEADER = -1, 0, -2


class Queue:
    """One queue with one spec ``k``, due at ``AT``, while ``me`` leads."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self.client, self.keys = client, Keys(name)
        self.spec = self.keys.repeat_spec("k")
        client.set(self.keys.scheduler_lock, "me", px=60_000)
        client.zadd(self.keys.repeat, {"k": AT})
        client.hset(self.spec, "spec", BLOB)

    def call(self, name: str, keys: list[str], *args: Any) -> Any:
        return self.client.eval(script(name).source, len(keys), *keys, *args)

    def fire(
        self,
        *envelopes: bytes,
        holder: str = "me",
        score: Any = AT,
        blob: bytes = BLOB,
        cap: int = 0,
        trim: int = 0,
        limit: int = 0,
        next_ms: int = AT + 1000,
        catchup: str = "",
        name: str = "job",
    ) -> Any:
        keys = [self.keys.scheduler_lock, self.keys.repeat, self.spec, self.keys.stream]
        sha = hashlib.sha1(blob).hexdigest()
        args = (holder, "k", score, sha, cap, trim, limit, next_ms, catchup, name)
        return self.call("fire_repeat", keys, *args, *envelopes)

    def set_aside(self, *, holder: str = "me", score: Any = AT, blob: bytes = BLOB, spec: str | None = None) -> Any:
        keys = [self.keys.scheduler_lock, self.keys.repeat, spec or self.spec, self.keys.dlq]
        return self.call("set_aside_repeat", keys, holder, "k", score, hashlib.sha1(blob).hexdigest(), 100, "why")

    def upsert(self, score: int = AT, blob: bytes = BLOB, dst: str = "") -> Any:
        return self.call("upsert_repeat", [self.keys.repeat, self.spec], score, "k", blob, dst)

    @property
    def jobs(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.client.xrange(self.keys.stream)]

    @property
    def dead(self) -> list[list[tuple[bytes, bytes]]]:
        """The dead letters, each as its fields in the order in which they are stored."""
        return [list(fields.items()) for _, fields in self.client.xrange(self.keys.dlq)]

    @property
    def score(self) -> float | None:
        return self.client.zscore(self.keys.repeat, "k")

    @property
    def fields(self) -> dict[bytes, bytes]:
        return self.client.hgetall(self.spec)


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Queue:
    return Queue(client, queue)


def untouched(q: Queue) -> bool:
    return (q.jobs, q.score, q.fields) == ([], AT, {b"spec": BLOB})


# Firing


def test_fire_adds_the_jobs_counts_them_and_moves_the_spec_on(q: Queue) -> None:
    assert q.fire(b"e1", b"e2") == [2, 0]

    assert q.jobs == [{b"d": b"e1", b"n": b"job"}, {b"d": b"e2", b"n": b"job"}]
    assert q.score == AT + 1000
    assert q.fields == {b"spec": BLOB, b"fired": b"2"}


def test_fire_without_a_name_writes_none(q: Queue) -> None:
    q.fire(b"e", name="")

    assert q.jobs == [{b"d": b"e"}]


def test_fire_of_nothing_moves_the_spec_on(q: Queue) -> None:
    assert q.fire() == [0, 0]

    assert (q.jobs, q.score, q.fields) == ([], AT + 1000, {b"spec": BLOB})


def test_fire_sent_twice_fires_once(q: Queue) -> None:
    assert q.fire(b"e") == [1, 0]
    assert q.fire(b"e") == CHANGED

    assert len(q.jobs) == 1
    assert q.fields[b"fired"] == b"1"


def test_fire_of_the_last_sent_twice_fires_once(q: Queue) -> None:
    assert q.fire(b"e", next_ms=0) == [1, 1]
    assert q.fire(b"e", next_ms=0) == CHANGED

    assert len(q.jobs) == 1


def test_without_a_next_fire_the_spec_is_removed(q: Queue) -> None:
    assert q.fire(b"e", next_ms=0) == [1, 1]

    assert (q.score, q.fields) == (None, {})


@pytest.mark.parametrize(
    ("already", "fired", "removed"), [(0, 2, 0), (1, 2, 1), (2, 1, 1), (3, 0, 1), (7, 0, 1)], ids=str
)
def test_limit_counts_all_fires_of_a_specs_life(q: Queue, already: int, fired: int, removed: int) -> None:
    q.client.hset(q.spec, "fired", already)

    assert q.fire(b"e1", b"e2", limit=3) == [fired, removed]

    assert len(q.jobs) == fired
    assert (q.score is None) == bool(removed)


@pytest.mark.parametrize("count", ["x", "", "-5", "1.5", "nan"])
def test_a_count_that_is_none_starts_from_zero_and_does_not_tear_the_step_apart(q: Queue, count: str) -> None:
    q.client.hset(q.spec, "fired", count)

    assert q.fire(b"e", limit=3) == [1, 0]

    assert q.fields[b"fired"] == b"1"


@pytest.mark.parametrize("holder", [None, "other"], ids=["lease ended", "another leads"])
def test_fire_without_the_lease_does_nothing(q: Queue, holder: str | None) -> None:
    q.client.delete(q.keys.scheduler_lock)
    if holder:
        q.client.set(q.keys.scheduler_lock, holder, px=60_000)

    assert q.fire(b"e") == NOT_LEADER
    assert untouched(q)


def test_fire_after_an_upsert_with_another_time_does_nothing(q: Queue) -> None:
    q.upsert(AT + 5)

    assert q.fire(b"e") == CHANGED
    assert q.jobs == []
    assert q.score == AT + 5


def test_fire_after_an_upsert_of_the_same_time_with_other_bytes_does_nothing(q: Queue) -> None:
    q.upsert(AT, b"new")

    assert q.fire(b"e") == CHANGED
    assert q.jobs == []
    assert q.fields == {b"spec": b"new"}


def test_fire_after_a_removal_does_nothing(q: Queue) -> None:
    assert q.call("remove_repeat", [q.keys.repeat, q.spec], "k") == 1

    assert q.fire(b"e") == CHANGED
    assert q.jobs == []
    assert q.score is None


def test_fire_of_a_spec_whose_bytes_are_gone_does_nothing(q: Queue) -> None:
    q.client.delete(q.spec)

    assert q.fire(b"e") == CHANGED
    assert q.jobs == []
    assert q.score == AT


def test_at_the_cap_the_spec_stays_as_it_is(q: Queue) -> None:
    for _ in range(3):
        q.client.xadd(q.keys.stream, {"d": "x"})

    assert q.fire(b"e", cap=3) == FULL
    assert (q.score, q.fields) == (AT, {b"spec": BLOB})

    assert q.fire(b"e", cap=4) == [1, 0]


def test_at_the_cap_a_spec_with_nothing_to_fire_moves_on(q: Queue) -> None:
    q.client.xadd(q.keys.stream, {"d": "x"})

    assert q.fire(cap=1) == [0, 0]
    assert q.score == AT + 1000


def test_trim_keeps_the_stream_short(q: Queue) -> None:
    for _ in range(5):
        q.client.zadd(q.keys.repeat, {"k": AT})
        q.fire(*[b"e"] * 200, trim=100)

    assert 100 <= len(q.jobs) < 500


def test_a_catch_up_that_goes_on_is_recorded_and_forgotten_when_it_ends(q: Queue) -> None:
    q.fire(b"e", catchup="5,500")
    assert q.fields[b"catchup"] == b"5,500"

    q.fire(b"e", score=AT + 1000, next_ms=AT + 2000)
    assert b"catchup" not in q.fields


def test_a_stream_key_of_another_type_is_an_error_before_anything_is_written(q: Queue) -> None:
    q.client.set(q.keys.stream, "x", ex=60)

    with pytest.raises(redis.ResponseError, match=r"WRONGTYPE .*:stream holds a string"):
        q.fire(b"e")

    assert (q.score, q.fields) == (AT, {b"spec": BLOB})


@pytest.mark.parametrize("score", ["-inf", "-7.25", "1234567890123.5", "1e3", "3"])
def test_a_score_reads_the_same_where_specs_are_listed_and_where_they_are_fired(q: Queue, score: str) -> None:
    q.client.zadd(q.keys.repeat, {"k": float(score)})

    _, due = q.call("due_repeats", [q.keys.repeat], 10)

    assert q.fire(b"e", score=due[1]) == [1, 0]


# Listing


def test_due_specs_come_with_the_servers_time_the_most_overdue_first(q: Queue) -> None:
    seconds, micros = q.client.time()
    now = seconds * 1000 + micros // 1000
    q.client.zadd(q.keys.repeat, {"k": now - 5, "late": now - 500, "soon": now + 60_000, "never": "inf"})

    told, due = q.call("due_repeats", [q.keys.repeat], 10)
    assert 0 <= told - now < 5000
    assert due == [b"late", str(now - 500).encode(), b"k", str(now - 5).encode()]

    assert q.call("due_repeats", [q.keys.repeat], 1)[1] == due[:2]


def test_without_specs_nothing_is_due(q: Queue) -> None:
    q.client.delete(q.keys.repeat)

    assert q.call("due_repeats", [q.keys.repeat], 10)[1] == []


# Setting aside


def test_set_aside_moves_the_bytes_to_the_dead_letters_and_removes_the_spec(q: Queue) -> None:
    assert q.set_aside() == 1

    assert q.dead == [[(b"d", BLOB), (b"source_id", b""), (b"reason", b"malformed"), (b"detail", b"why")]]
    assert (q.score, q.fields) == (None, {})


def test_set_aside_sent_twice_writes_one_dead_letter(q: Queue) -> None:
    assert [q.set_aside(), q.set_aside()] == [1, CHANGED]

    assert len(q.dead) == 1


def test_set_aside_of_a_spec_without_bytes_writes_none(q: Queue) -> None:
    q.client.delete(q.spec)

    assert q.set_aside(blob=b"") == 1
    assert q.dead[0][0] == (b"d", b"")
    assert q.score is None


MEND: list[tuple[str, Callable[[Queue], object]]] = [
    ("other bytes", lambda q: q.upsert(AT, b"mended")),
    ("another time", lambda q: q.upsert(AT + 5)),
    ("another leads", lambda q: q.client.set(q.keys.scheduler_lock, "other", px=60_000)),
    ("lease ended", lambda q: q.client.delete(q.keys.scheduler_lock)),
]


@pytest.mark.parametrize("change", [row[1] for row in MEND], ids=[row[0] for row in MEND])
def test_set_aside_of_what_has_changed_since_it_was_judged_does_nothing(
    q: Queue, change: Callable[[Queue], object]
) -> None:
    change(q)
    before = (q.score, q.fields)

    assert q.set_aside() in (CHANGED, NOT_LEADER)
    assert q.dead == []
    assert (q.score, q.fields) == before


def test_a_spec_that_appeared_since_it_was_found_missing_is_not_set_aside(q: Queue) -> None:
    assert q.set_aside(blob=b"") == CHANGED
    assert q.fields == {b"spec": BLOB}


def test_set_aside_leaves_a_key_of_another_type_alone(q: Queue) -> None:
    q.client.delete(q.spec)
    q.client.set(q.spec, "precious", ex=60)

    assert q.set_aside(blob=b"") == 1
    assert q.client.get(q.spec) == b"precious"
    assert q.score is None


def test_set_aside_with_the_sets_own_key_for_the_spec_leaves_the_set_alone(q: Queue) -> None:
    q.client.zadd(q.keys.repeat, {"other": 5})

    assert q.set_aside(blob=b"", spec=q.keys.repeat) == 1
    assert q.client.zrange(q.keys.repeat, 0, -1) == [b"other"]


def test_dead_letters_of_another_type_are_an_error_before_anything_is_removed(q: Queue) -> None:
    q.client.set(q.keys.dlq, "x", ex=60)

    with pytest.raises(redis.ResponseError, match=r"WRONGTYPE .*:dlq holds a string"):
        q.set_aside()

    assert untouched(q)


# Storing


def test_upsert_overwrites_and_keeps_the_count(q: Queue) -> None:
    q.fire(b"e", catchup="5,500")

    assert q.upsert(AT + 7, b"new", "skip,both") == 1

    assert q.score == AT + 7
    assert q.fields == {b"spec": b"new", b"fired": b"1", b"dst": b"skip,both"}


def test_upsert_with_the_usual_policies_takes_others_away(q: Queue) -> None:
    q.upsert(dst="skip,both")
    q.upsert()

    assert b"dst" not in q.fields


@pytest.mark.parametrize("which", ["repeat", "spec"])
def test_upsert_checks_both_keys_before_it_writes(q: Queue, which: str) -> None:
    bad, good = (q.keys.repeat, q.spec) if which == "repeat" else (q.spec, q.keys.repeat)
    before = q.client.dump(good)
    q.client.delete(bad)
    q.client.set(bad, "x", ex=60)

    with pytest.raises(redis.ResponseError, match=r"WRONGTYPE .*holds a string"):
        q.upsert(AT + 7, b"new")

    assert q.client.dump(good) == before
    q.client.delete(bad)


def test_remove_takes_spec_and_bytes_once(q: Queue) -> None:
    answers = [q.call("remove_repeat", [q.keys.repeat, q.spec], "k") for _ in range(2)]

    assert answers == [1, 0]
    assert (q.score, q.fields) == (None, {})


def test_remove_takes_bytes_that_nothing_points_to(q: Queue) -> None:
    q.client.zrem(q.keys.repeat, "k")

    assert q.call("remove_repeat", [q.keys.repeat, q.spec], "k") == 0
    assert q.fields == {}
