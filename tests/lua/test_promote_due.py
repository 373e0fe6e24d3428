"""promote_due: due members become jobs once, as leader only, in bounded steps, and none that is no job stops it."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from chasqui.protocol.codec import encode_member
from tests.lua.worker_pending import Pending


class Delayed(Pending):
    """A queue whose delayed set is worked on."""

    def put(self, name: str, envelope: str, at: int = 1) -> None:
        self.client.zadd(self.keys.delayed, {encode_member(name.encode(), envelope.encode()): at})

    def promote(
        self, *, holder: str = "me", batch: int = 100, cap: int = 0, trim: int = 0, dlq_len: int = 100, tell: int = 1
    ) -> Any:
        keys = [self.keys.delayed, self.keys.stream, self.keys.promoter_lock, self.keys.dlq]
        return self.call("promote_due", keys, holder, 60_000, batch, cap, trim, dlq_len, tell)

    @property
    def jobs(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.client.xrange(self.keys.stream)]


@pytest.fixture
def q(client: redis.Redis, queue: str) -> Delayed:
    return Delayed(client, queue)


def test_due_members_are_moved_in_order_with_their_names_and_told(q: Delayed) -> None:
    q.put("é", "second", at=2)
    q.put("", "first", at=1)

    handled, moved, left, lag, envelopes = q.promote()

    assert (handled, moved, left, lag, envelopes) == (2, 2, 0, 0, [b"first", b"second"])
    assert q.jobs == [{b"d": b"first"}, {b"d": b"second", b"n": "é".encode()}]


def test_what_is_not_due_stays(q: Delayed) -> None:
    q.put("", "later", at=q.now_ms() + 60_000)

    assert q.promote() == [0, 0, 1, 0, []]

    assert q.jobs == []


def test_a_member_is_due_at_its_very_millisecond(q: Delayed) -> None:
    q.put("", "now", at=q.now_ms())

    assert q.promote()[0] == 1


def test_a_second_call_moves_nothing(q: Delayed) -> None:
    q.put("", "once")

    assert (q.promote()[1], q.promote()[1]) == (1, 0)

    assert len(q.jobs) == 1


def test_a_batch_is_not_exceeded_and_the_lag_of_the_rest_is_told(q: Delayed) -> None:
    for n in range(5):
        q.put("", f"e{n}", at=q.now_ms() - 10_000 + n)

    handled, moved, left, lag, _ = q.promote(batch=2)

    assert (handled, moved, left) == (2, 2, 3)
    assert 9_000 < lag < 30_000


def test_the_lease_is_taken_and_renewed_with_each_call(q: Delayed) -> None:
    q.promote()
    q.client.pexpire(q.keys.promoter_lock, 1_000)

    q.promote()

    assert q.client.get(q.keys.promoter_lock) == b"me"
    assert q.client.pttl(q.keys.promoter_lock) > 50_000


def test_while_another_leads_nothing_is_touched(q: Delayed) -> None:
    q.client.set(q.keys.promoter_lock, "other", px=30_000)
    q.put("", "e")
    q.client.zadd(q.keys.delayed, {b"bad": 1})

    assert q.promote() == [-1]

    assert (q.jobs, q.client.zcard(q.keys.delayed), q.dead) == ([], 2, [])
    assert q.client.pttl(q.keys.promoter_lock) <= 30_000


@pytest.mark.parametrize("bad", [b"", b"abc", b"\x04\x00\x00\x00abc", b"\xff\xff\xff\xff"], ids=repr)
def test_a_member_that_is_no_job_goes_to_the_dead_letters_and_counts_as_handled(q: Delayed, bad: bytes) -> None:
    q.client.zadd(q.keys.delayed, {bad: 1})
    q.put("", "good", at=2)

    assert q.promote()[:3] == [2, 1, 0]

    ((_, letter),) = q.client.xrange(q.keys.dlq)
    assert list(letter) == [b"d", b"source_id", b"reason", b"detail"]
    assert (letter[b"d"], letter[b"source_id"], letter[b"reason"]) == (bad, b"", b"malformed")
    assert letter[b"detail"] == b"delayed member without a whole name"
    assert q.stream == ["good"]


def test_a_member_that_is_all_name_has_an_empty_envelope(q: Delayed) -> None:
    q.put("name", "")

    q.promote()

    assert q.jobs == [{b"d": b"", b"n": b"name"}]


@pytest.mark.parametrize(("there", "moved"), [(0, 5), (3, 2), (5, 0), (9, 0)])
def test_at_the_cap_jobs_stay_where_they_are(q: Delayed, there: int, moved: int) -> None:
    q.add(*(str(n) for n in range(there)))
    for n in range(8):
        q.put("", f"e{n}")

    assert q.promote(cap=5)[1:3] == [moved, 8 - moved]


def test_the_stream_is_trimmed_only_when_told_to(q: Delayed) -> None:
    for n in range(600):
        q.put("n", f"e{n}")

    assert q.promote(batch=1000, trim=100)[1] == 600

    assert 100 <= len(q.jobs) <= 300


def test_no_more_than_about_a_megabyte_is_moved_at_a_time_but_always_one(q: Delayed) -> None:
    for n in range(4):
        q.put("", str(n) * 600_000, at=n + 1)

    assert [q.promote()[1] for _ in range(3)] == [2, 2, 0]


def test_made_ids_are_told_only_where_asked_for(q: Delayed) -> None:
    q.client.zadd(q.keys.delayed, {b"\x00\x00\x00\x00\x94\xba" + b"i" * 26: 1, b"\x00\x00\x00\x00\x94\xa1i": 2})

    assert q.promote(tell=0)[4] == [b"\x94\xa1i"]


@pytest.mark.parametrize("key", ["delayed", "stream"])
def test_a_key_of_another_type_is_an_error_and_nothing_is_touched(q: Delayed, key: str) -> None:
    if key != "delayed":
        q.put("", "e")
    name = getattr(q.keys, key)
    q.client.delete(name)
    q.client.set(name, "mine", ex=60)

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        q.promote()

    assert q.client.get(name) == b"mine"
    assert not q.client.exists(q.keys.promoter_lock)
    if key != "delayed":
        assert q.client.zcard(q.keys.delayed) == 1
