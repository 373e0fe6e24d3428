"""The promoter: each delayed job once, in time, by one leader; bad members aside; and nothing beyond the cap."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui import InMemorySink, Producer, RetryOverride
from chasqui.embedded import EmbeddedServer
from chasqui.protocol.codec import encode_member
from tests.engine.breaks import each_break
from tests.engine.seen import an_envelope, ids, in_delayed, in_stream, key, keys_of
from tests.engine.worker_proxy import script_proxy
from tests.engine.worker_tools import Process, dead_letters, event_names, events, nothing_left, promoting, working
from tests.proxy import Act
from tests.support import eventually

StartLike = Callable[..., EmbeddedServer]


# Moving


def test_a_due_job_is_moved_whole_and_a_later_one_is_not(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_in(150, {"k": 1}, id="soon", name="é", retry=RetryOverride(7))
        producer.add_in(60_000, {"k": 2}, id="later")
        (before, _) = in_delayed(client, queue)

        with promoting(url, queue):
            eventually(lambda: in_stream(client, queue))
            moved_at = time.time() * 1000

    (after,) = in_stream(client, queue)
    assert (after.id, after.name, after.payload, after.retry) == ("soon", "é", {"k": 1}, RetryOverride(7))
    assert (after.created_at_ms, after.attempt) == (before.created_at_ms, 0)
    assert before.at is not None
    assert moved_at >= before.at - 5
    assert ids(in_delayed(client, queue)) == ["later"]


def test_due_jobs_are_moved_in_the_order_of_their_times(url: str, client: redis.Redis, queue: str) -> None:
    now = int(time.time() * 1000)
    for n in (3, 1, 2):
        member = encode_member(b"", an_envelope(f"j-{n}", n))
        client.zadd(key(queue, "delayed"), {member: now - 1000 + n})

    with promoting(url, queue, promote_batch=1):
        eventually(lambda: client.xlen(key(queue, "stream")) == 3)

    assert ids(in_stream(client, queue)) == ["j-1", "j-2", "j-3"]


def test_more_than_a_batch_is_moved_without_waiting_in_between(url: str, client: redis.Redis, queue: str) -> None:
    sink = InMemorySink()
    with Producer(url, queue=queue) as producer:
        producer.add_in_bulk(1, range(500))
        eventually(lambda: time.time() * 1000 > max(job.at or 0 for job in in_delayed(client, queue)))

        with promoting(url, queue, promote_batch=50, poll_interval_ms=5_000, metrics=sink):
            eventually(lambda: client.xlen(key(queue, "stream")) == 500, within=4)
            eventually(lambda: sink.promoted == 500)

    assert sink.depth == 0
    assert len(set(ids(in_stream(client, queue)))) == 500


def test_the_index_for_cancelling_goes_and_the_marker_of_the_id_stays(
    url: str, client: redis.Redis, queue: str
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_in(1, 1, id="j")
        assert key(queue, "didx:j") in keys_of(client, queue)

        with promoting(url, queue, events_enabled=False):
            eventually(lambda: key(queue, "didx:j") not in keys_of(client, queue))

        assert producer.cancel_delayed("j") is False
        producer.add_in(1, 1, id="j")
    assert keys_of(client, queue) == [key(queue, "dlid:j"), key(queue, "stream")]
    assert client.xlen(key(queue, "stream")) == 1


def test_every_promoted_job_is_told_as_waiting(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        added = producer.add_in_bulk(1, range(20), name="x")
        with promoting(url, queue):
            eventually(lambda: client.xlen(key(queue, "events")) == 20)

    assert {tuple(event) for event in events(client, queue)} == {("e", "id", "ts")}
    assert sorted(event["id"] for event in events(client, queue)) == sorted(added)


# Bad members


BAD = {
    "empty": b"",
    "shorter than its length": b"\x01\x00\x00",
    "name beyond the end": b"\x09\x00\x00\x00abc",
    "largest name": b"\xff\xff\xff\xffabc",
}


def test_a_malformed_member_goes_to_the_dead_letters_with_detail_and_others_are_promoted(
    url: str, client: redis.Redis, queue: str
) -> None:
    for n, member in enumerate(BAD.values()):
        client.zadd(key(queue, "delayed"), {member: n + 1})
    with Producer(url, queue=queue) as producer:
        producer.add_in(1, 1, id="good")

        with promoting(url, queue):
            eventually(lambda: in_stream(client, queue))
            producer.add_in(1, 2, id="later")
            eventually(lambda: len(in_stream(client, queue)) == 2)

        shown = producer.peek_dlq()
    assert ids(in_stream(client, queue)) == ["good", "later"]
    assert [letter["d"] for letter in dead_letters(client, queue)] == list(BAD.values())
    assert [list(letter) for letter in dead_letters(client, queue)] == [["d", "source_id", "reason", "detail"]] * 4
    assert {(entry.reason, bool(entry.detail), entry.job) for entry in shown} == {("malformed", True, None)}
    assert in_delayed(client, queue) == []


def test_a_member_that_holds_no_envelope_is_promoted_and_set_aside_by_the_worker(
    url: str, client: redis.Redis, queue: str
) -> None:
    client.zadd(key(queue, "delayed"), {b"\x01\x00\x00\x00x": 1, b"\x00\x00\x00\x00\xc1": 2})

    with working(url, queue, print):
        eventually(lambda: len(dead_letters(client, queue)) == 2 and nothing_left(client, queue))

    assert sorted(letter["d"] for letter in dead_letters(client, queue)) == [b"", b"\xc1"]
    assert {letter["reason"] for letter in dead_letters(client, queue)} == {b"decode_failed"}


def test_a_key_of_another_type_is_waited_out(url: str, client: redis.Redis, queue: str) -> None:
    client.set(key(queue, "stream"), "mine", ex=60)
    with Producer(url, queue=queue) as producer:
        producer.add_in(1, 1, id=None)
        with promoting(url, queue):
            time.sleep(0.1)  # it tries, and is refused
            assert len(in_delayed(client, queue)) == 1
            client.delete(key(queue, "stream"))

            eventually(lambda: in_stream(client, queue))


# The cap


def test_the_promoter_holds_at_the_cap_and_goes_on_after(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_in_bulk(1, range(30))

        with promoting(url, queue, max_stream_len=20):
            eventually(lambda: client.xlen(key(queue, "stream")) == 18)
            time.sleep(0.1)  # several more passes
            assert (client.xlen(key(queue, "stream")), client.zcard(key(queue, "delayed"))) == (18, 12)
            client.xtrim(key(queue, "stream"), maxlen=5, approximate=False)

            eventually(lambda: client.xlen(key(queue, "stream")) == 17)
    assert client.zcard(key(queue, "delayed")) == 0


def test_the_promoter_trims_only_when_told_to(url: str, client: redis.Redis, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_in_bulk(1, range(1000))

        with promoting(url, queue, max_stream_len=100, overflow="trim"):
            eventually(lambda: client.zcard(key(queue, "delayed")) == 0)

    assert 100 <= client.xlen(key(queue, "stream")) <= 300


def test_a_worker_with_a_full_stream_drains_what_is_delayed(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[int] = []
    with Producer(url, queue=queue) as producer:
        producer.add_in_bulk(1, range(50))
        with working(url, queue, lambda job: seen.append(job.payload), delayed_max_stream_len=10):
            eventually(lambda: nothing_left(client, queue))

    assert sorted(seen) == list(range(50))


# One leader


def test_two_promoters_promote_each_job_once(url: str, client: redis.Redis, queue: str) -> None:
    sinks = InMemorySink(), InMemorySink()
    with (
        Producer(url, queue=queue) as producer,
        promoting(url, queue, metrics=sinks[0], promote_batch=10),
        promoting(url, queue, metrics=sinks[1], promote_batch=10),
    ):
        added = producer.add_in_bulk(50, range(500))
        eventually(lambda: sinks[0].promoted + sinks[1].promoted >= 500)

    assert sorted(ids(in_stream(client, queue))) == sorted(added)
    assert sorted(sink.promoted for sink in sinks) == [0, 500]


def test_leadership_is_told_when_it_changes_and_only_then(url: str, client: redis.Redis, queue: str) -> None:
    leader, spare = InMemorySink(), InMemorySink()
    with promoting(url, queue, metrics=leader, holder_id="leader"):
        eventually(lambda: leader.calls["promoter_tick"] > 5)
        with promoting(url, queue, metrics=spare, holder_id="spare"):
            eventually(lambda: spare.held)
            time.sleep(0.1)
            assert client.get(key(queue, "promoter:lock")) == b"leader"

    assert (leader.acquired, leader.held) == ({"promoter": 1}, {})
    assert (spare.acquired, spare.held, spare.promoted) == ({}, {"promoter": 1}, 0)


def test_a_leader_that_stops_gives_the_lease_back_and_the_spare_takes_over_at_once(
    url: str, client: redis.Redis, queue: str
) -> None:
    spare = InMemorySink()
    with promoting(url, queue, lock_ttl_secs=60) as leader:
        eventually(lambda: client.exists(key(queue, "promoter:lock")))
        with promoting(url, queue, metrics=spare, lock_ttl_secs=60):
            leader.stop()
            eventually(lambda: spare.acquired, within=2)

    assert not client.exists(key(queue, "promoter:lock"))


def test_a_lease_of_another_is_neither_taken_nor_given_back(url: str, client: redis.Redis, queue: str) -> None:
    client.set(key(queue, "promoter:lock"), "native", px=60_000)
    sink = InMemorySink()
    with Producer(url, queue=queue) as producer:
        producer.add_in(1, 1)
        with promoting(url, queue, metrics=sink):
            eventually(lambda: sink.held)

    assert client.get(key(queue, "promoter:lock")) == b"native"
    assert len(in_delayed(client, queue)) == 1


def test_a_hot_spare_takes_over_within_the_lease_after_the_leader_is_killed(
    url: str, client: redis.Redis, queue: str
) -> None:
    lock, spare = key(queue, "promoter:lock"), InMemorySink()
    with (
        Producer(url, queue=queue) as producer,
        Process("promoter", url, queue, lock_ttl_secs=1, poll_interval_ms=10, holder_id="leader") as leader,
    ):
        eventually(lambda: client.get(lock) == b"leader")
        with promoting(url, queue, lock_ttl_secs=1, holder_id="spare", metrics=spare):
            eventually(lambda: spare.held)
            leader.signal(signal.SIGKILL)
            killed = time.monotonic()
            producer.add_in(1, 1)
            eventually(lambda: in_stream(client, queue))

    assert time.monotonic() - killed < 2.5
    assert spare.acquired == {"promoter": 1}


def test_a_leader_that_was_stopped_for_longer_than_its_lease_does_no_harm_when_it_goes_on(
    url: str, client: redis.Redis, queue: str
) -> None:
    lock = key(queue, "promoter:lock")
    with (
        Producer(url, queue=queue) as producer,
        Process("promoter", url, queue, lock_ttl_secs=1, poll_interval_ms=1, holder_id="stopped") as stopped,
    ):
        eventually(lambda: client.get(lock) == b"stopped")
        stopped.signal(signal.SIGSTOP)
        with promoting(url, queue, lock_ttl_secs=60, holder_id="spare", promote_batch=1):
            eventually(lambda: client.get(lock) == b"spare")
            added = producer.add_in_bulk(1, range(200))
            stopped.signal(signal.SIGCONT)
            eventually(lambda: client.xlen(key(queue, "stream")) >= 200)
            stopped.signal(signal.SIGTERM)
            stopped.wait()

            assert client.get(lock) == b"spare"
    assert sorted(ids(in_stream(client, queue))) == sorted(added)


# Races and faults


def test_a_job_is_either_promoted_or_cancelled_and_never_both_or_neither(
    url: str, client: redis.Redis, queue: str
) -> None:
    names = [f"j-{n}" for n in range(300)]
    cancelled: list[str] = []

    def cancel() -> None:
        with Producer(url, queue=queue) as other:
            cancelled.extend(name for name in reversed(names) if other.cancel_delayed(name))

    with Producer(url, queue=queue) as producer:
        producer.add_in_bulk(100, range(300), ids=names)
        thread = threading.Thread(target=cancel)
        with promoting(url, queue, promote_batch=2, poll_interval_ms=1):
            eventually(lambda: client.xlen(key(queue, "stream")), every=0.0005)
            thread.start()
            thread.join()
            eventually(lambda: client.zcard(key(queue, "delayed")) == 0)

    promoted = ids(in_stream(client, queue))
    assert sorted(promoted + cancelled) == sorted(names)
    assert promoted
    assert cancelled


@each_break
def test_a_promotion_that_is_broken_off_moves_each_job_once(
    server: EmbeddedServer, client: redis.Redis, queue: str, act: Act
) -> None:
    with script_proxy(server) as proxy, Producer(server.url, queue=queue) as producer:
        added = producer.add_in_bulk(1, range(20))
        for nth in (1, 2, 4):
            proxy.on("promote_due", nth=nth, act=act)
        with promoting(proxy.url, queue, promote_batch=5):
            eventually(lambda: client.zcard(key(queue, "delayed")) == 0)

    assert sorted(ids(in_stream(client, queue))) == sorted(added)


def test_a_promoter_goes_on_after_the_server_was_restarted(start_like: StartLike, queue: str) -> None:
    server = start_like(config={"appendonly": "yes", "appendfsync": "always"})
    with (
        redis.Redis.from_url(server.url, protocol=2) as client,
        Producer(server.url, queue=queue) as producer,
        promoting(server.url, queue, lock_ttl_secs=1),
    ):
        producer.add_in(300, 1, id="j")
        server.kill()
        server.restart()

        eventually(lambda: ids(in_stream(client, queue)) == ["j"], within=3)


def test_events_that_cannot_be_written_do_not_hold_up_the_promoter(url: str, client: redis.Redis, queue: str) -> None:
    client.set(key(queue, "events"), "mine", ex=60)
    with Producer(url, queue=queue) as producer:
        producer.add_in_bulk(1, range(20))
        with promoting(url, queue, promote_batch=5):
            eventually(lambda: client.xlen(key(queue, "stream")) == 20)


def test_a_consumer_without_promoter_leaves_delayed_jobs_alone(url: str, client: redis.Redis, queue: str) -> None:
    seen: list[Any] = []
    with Producer(url, queue=queue) as producer:
        producer.add_in(1, 1)
        producer.add(2, id="now")
        with working(url, queue, lambda job: seen.append(job.payload), delayed_enabled=False):
            eventually(lambda: "drained" in event_names(client, queue))

    assert seen == [2]
    assert len(in_delayed(client, queue)) == 1


def test_the_leader_inside_a_consumer_goes_by_the_consumers_name(url: str, client: redis.Redis, queue: str) -> None:
    with working(url, queue, print) as worker:
        eventually(lambda: client.get(key(queue, "promoter:lock")) == worker.role.consumer_id.encode())

    assert not client.exists(key(queue, "promoter:lock"))


@pytest.mark.parametrize("bad", [{"poll_interval_ms": 0}, {"promote_batch": 1001}, {"overflow": "block"}], ids=repr)
def test_a_wrong_option_of_the_promoter_is_refused(url: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        promoting(url, "q", **bad)
