"""Dead letters: looking at them, sending them back, deleting them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
import redis

from chasqui import Backoff, DlqEntry, Job, QueueFull, RetryOverride
from chasqui.protocol.dead_letters import PAGE
from tests.engine.conftest import Connect
from tests.engine.seen import an_envelope, in_stream, key, keys_of, payloads, put_dead_letter

NO_JOB = b"\xc1 no MessagePack"


def left(client: redis.Redis, queue: str) -> list[str]:
    """The ids of the dead letters that are there."""
    return [entry_id.decode() for entry_id, _ in client.xrange(key(queue, "dlq"))]


# Peek


def test_peek_tells_everything_about_a_dead_letter(producer: Any, client: redis.Redis, queue: str) -> None:
    retry = RetryOverride(2, Backoff.fixed(5))
    data = an_envelope("j", {"a": 1}, attempt=2, retry=retry)
    placed = put_dead_letter(client, queue, data, n="ñ", source_id="7-1", detail="why", error="ValueError: no")

    found = producer.peek_dlq()

    job = Job("j", "ñ", {"a": 1}, 1794978620538, 2, retry, "7-1")
    assert found == [DlqEntry(placed, "7-1", "retries_exhausted", "why", data, "ñ", job, "ValueError: no")]


def test_peek_of_a_native_dead_letter_has_neither_detail_nor_error(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    put_dead_letter(client, queue, 1, reason="unrecoverable")

    [entry] = producer.peek_dlq()

    assert (entry.reason, entry.detail, entry.error, entry.name) == ("unrecoverable", None, None, "")
    assert entry.job.payload == 1


@pytest.mark.parametrize("data", [b"", NO_JOB, b"\x92\x01\x02"], ids=["empty", "junk", "short"])
def test_peek_shows_bytes_that_are_no_job(producer: Any, client: redis.Redis, queue: str, data: bytes) -> None:
    put_dead_letter(client, queue, data, reason="malformed", detail="missing", n="x")

    [entry] = producer.peek_dlq()

    assert (entry.job, entry.payload, entry.detail, entry.name) == (None, data, "missing", "x")


def test_peek_shows_a_letter_with_no_field_that_we_know(producer: Any, client: redis.Redis, queue: str) -> None:
    client.xadd(key(queue, "dlq"), {"other": b"\xff"})

    [entry] = producer.peek_dlq()

    assert (entry.source_id, entry.reason, entry.payload, entry.name, entry.job) == ("", "", b"", "", None)


def test_peek_shows_the_oldest_first_up_to_the_limit(producer: Any, client: redis.Redis, queue: str) -> None:
    placed = [put_dead_letter(client, queue, n) for n in range(25)]

    assert [entry.dlq_id for entry in producer.peek_dlq()] == placed[:20]
    assert [entry.dlq_id for entry in producer.peek_dlq(3)] == placed[:3]
    assert [entry.dlq_id for entry in producer.peek_dlq(1000)] == placed
    assert producer.peek_dlq(0) == []


def test_peek_goes_on_after_an_id(producer: Any, client: redis.Redis, queue: str) -> None:
    placed = [put_dead_letter(client, queue, n) for n in range(5)]

    assert [entry.dlq_id for entry in producer.peek_dlq(2, after=placed[1])] == placed[2:4]
    assert producer.peek_dlq(after=placed[4]) == []


def test_a_queue_without_dead_letters_has_none(producer: Any, client: redis.Redis, queue: str) -> None:
    assert producer.peek_dlq() == []
    assert producer.replay_dlq() == 0
    assert producer.purge_dlq() == 0
    assert keys_of(client, queue) == []


def test_raw_peek_leaves_the_payload_packed(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    put_dead_letter(client, queue, 7)

    [entry] = connect(url, queue=queue, raw=True).peek_dlq()

    assert entry.job.payload == msgpack.packb(7)


# Replay


def test_replay_moves_the_job_back_with_attempt_0_and_all_else_kept(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    retry = RetryOverride(2, Backoff.exponential(5))
    put_dead_letter(client, queue, an_envelope("j", {"a": 1}, attempt=2, retry=retry), n="ñ")
    put_dead_letter(client, queue, an_envelope("k", 2, attempt=9))

    moved = producer.replay_dlq()

    one, two = in_stream(client, queue)
    assert moved == 2
    assert (one.id, one.name, one.payload, one.created_at_ms, one.attempt, one.retry) == (
        *("j", "ñ", {"a": 1}, 1794978620538, 0),
        retry,
    )
    assert (two.id, two.name, two.attempt, two.retry) == ("k", "", 0, None)
    assert left(client, queue) == []


def test_replay_passes_over_what_is_no_job(producer: Any, client: redis.Redis, queue: str) -> None:
    stuck = [put_dead_letter(client, queue, NO_JOB) for _ in range(PAGE + 20)]
    for n in range(3):
        put_dead_letter(client, queue, n)

    first, second = producer.replay_dlq(limit=2), producer.replay_dlq(limit=2)

    assert (first, second) == (2, 1)
    assert payloads(in_stream(client, queue)) == [0, 1, 2]
    assert left(client, queue) == stuck


def test_replay_moves_a_job_whose_payload_does_not_unpack(producer: Any, client: redis.Redis, queue: str) -> None:
    put_dead_letter(client, queue, b"\x94\xa1j\xc4\x01\xc1\x01\x05")

    assert producer.replay_dlq() == 1
    [(_, fields)] = client.xrange(key(queue, "stream"))
    assert fields[b"d"] == b"\x94\xa1j\xc4\x01\xc1\x01\x00"


def test_replay_moves_the_oldest_up_to_the_limit(producer: Any, client: redis.Redis, queue: str) -> None:
    placed = [put_dead_letter(client, queue, n) for n in range(2 * PAGE + 30)]

    assert producer.replay_dlq(0) == 0
    assert producer.replay_dlq(3) == 3
    assert producer.replay_dlq() == 100
    assert left(client, queue) == placed[103:]
    assert producer.replay_dlq(10_000) == 2 * PAGE + 30 - 103
    assert payloads(in_stream(client, queue)) == list(range(2 * PAGE + 30))


def test_replay_of_named_ids_moves_just_those_in_that_order(producer: Any, client: redis.Redis, queue: str) -> None:
    placed = [put_dead_letter(client, queue, n) for n in range(5)]
    bad = put_dead_letter(client, queue, NO_JOB)

    moved = producer.replay_dlq(ids=[placed[3], "1-1", placed[1], placed[3], bad])

    assert moved == 2
    assert payloads(in_stream(client, queue)) == [3, 1]
    assert left(client, queue) == [placed[0], placed[2], placed[4], bad]


def test_replay_of_named_ids_is_not_held_by_the_default_limit(producer: Any, client: redis.Redis, queue: str) -> None:
    placed = [put_dead_letter(client, queue, n) for n in range(150)]

    assert producer.replay_dlq(ids=placed) == 150
    assert producer.replay_dlq(ids=[]) == 0


def test_two_replays_at_once_move_each_letter_once(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    for n in range(300):
        put_dead_letter(client, queue, n)
    producers = [connect(url, queue=queue) for _ in range(2)]

    with ThreadPoolExecutor(2) as threads:
        moved = list(threads.map(lambda producer: producer.replay_dlq(300), producers))

    assert sum(moved) == 300
    assert sorted(payloads(in_stream(client, queue))) == list(range(300))
    assert left(client, queue) == []


def test_replay_stops_at_the_cap_and_says_how_many_were_moved(
    connect: Connect, url: str, client: redis.Redis, queue: str
) -> None:
    producer = connect(url, queue=queue, max_stream_len=20)
    producer.add_bulk(["waiting"] * 13)
    placed = [put_dead_letter(client, queue, n) for n in range(10)]

    with pytest.raises(QueueFull, match=r"\b5 dead letters were replayed"):
        producer.replay_dlq()

    assert payloads(in_stream(client, queue))[13:] == [0, 1, 2, 3, 4]
    assert left(client, queue) == placed[5:]


def test_replay_with_trim_goes_on_at_the_cap(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    producer = connect(url, queue=queue, max_stream_len=1, overflow="trim")
    for n in range(10):
        put_dead_letter(client, queue, n)

    assert producer.replay_dlq() == 10
    assert payloads(in_stream(client, queue))[-1] == 9


def test_replay_of_many_large_letters_moves_all(producer: Any, client: redis.Redis, queue: str) -> None:
    for n in range(8):
        put_dead_letter(client, queue, an_envelope(str(n), b"x" * 400_000))

    assert producer.replay_dlq() == 8
    assert [job.id for job in in_stream(client, queue)] == [str(n) for n in range(8)]


# Purge


def test_purge_deletes_all(producer: Any, client: redis.Redis, queue: str) -> None:
    for n in range(PAGE + 50):
        put_dead_letter(client, queue, n if n % 2 else NO_JOB)

    assert producer.purge_dlq() == PAGE + 50
    assert left(client, queue) == []
    assert in_stream(client, queue) == []


def test_purge_deletes_the_oldest_up_to_the_limit(producer: Any, client: redis.Redis, queue: str) -> None:
    placed = [put_dead_letter(client, queue, n) for n in range(PAGE + 50)]

    assert producer.purge_dlq(0) == 0
    assert producer.purge_dlq(PAGE + 10) == PAGE + 10
    assert left(client, queue) == placed[PAGE + 10 :]


def test_purge_of_named_ids_deletes_just_those(producer: Any, client: redis.Redis, queue: str) -> None:
    placed = [put_dead_letter(client, queue, n) for n in range(4)]

    assert producer.purge_dlq(ids=[placed[2], "1-1", placed[0], placed[2]]) == 2
    assert producer.purge_dlq(ids=[]) == 0
    assert left(client, queue) == [placed[1], placed[3]]
