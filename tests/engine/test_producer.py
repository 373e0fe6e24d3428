"""Adding one job at a time: what is written, what is returned, and ids that are taken once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from chasqui import Backoff, NewJob, Producer, RetryOverride
from chasqui.embedded import EmbeddedServer
from chasqui.protocol.codec import Envelope, encode_envelope
from tests.engine.conftest import Connect
from tests.engine.seen import ids, in_delayed, in_stream, key, keys_of, payloads
from tests.support import eventually

ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
DAY_S = 24 * 3600

# Writes


def test_add_writes_the_envelope_and_the_name_and_returns_the_id(
    producer: Any, client: redis.Redis, queue: str
) -> None:
    retry = RetryOverride(7, Backoff.exponential(100, multiplier=3, max_delay_ms=10_000, jitter_ms=0))
    before = time.time_ns() // 1_000_000

    returned = producer.add({"to": "a", "n": 1}, id="job-1", name="send-email", retry=retry)

    [job] = in_stream(client, queue)
    assert returned == job.id == "job-1"
    assert (job.name, job.payload, job.attempt, job.retry) == ("send-email", {"to": "a", "n": 1}, 0, retry)
    assert before <= job.created_at_ms <= time.time_ns() // 1_000_000


def test_add_writes_the_bytes_that_the_codec_gives(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add([1, 2.5, "s"], id="job-4", name="x", retry=RetryOverride(2))

    [(_, fields)] = client.xrange(producer.stream_key)
    created = in_stream(client, queue)[0].created_at_ms
    payload = bytes.fromhex("9301cb4004000000000000a173")
    assert fields == {
        b"d": encode_envelope(Envelope("job-4", payload, created, 0, RetryOverride(2))),
        b"n": b"x",
    }


def test_an_unnamed_job_has_no_name_field(producer: Any, client: redis.Redis) -> None:
    producer.add(1)

    [(_, fields)] = client.xrange(producer.stream_key)
    assert list(fields) == [b"d"]


def test_an_id_is_made_where_none_is_given(producer: Any, client: redis.Redis, queue: str) -> None:
    made = [producer.add(n) for n in range(20)]

    assert all(ULID.fullmatch(one) for one in made)
    assert len(set(made)) == 20
    assert ids(in_stream(client, queue)) == made


@pytest.mark.parametrize(
    "payload",
    [
        None,
        False,
        0,
        -(2**63),
        2**64 - 1,
        1.5,
        "",
        "ñandú 🦙",
        b"",
        b"\x00\xff",
        [],
        {},
        {"a": {"b": [1, None, {"c": b"x"}]}},
        {1: "int key"},
        "x" * 70_000,
    ],
    ids=lambda payload: repr(payload)[:30],
)
def test_payloads_arrive_as_they_were_given(producer: Any, client: redis.Redis, queue: str, payload: Any) -> None:
    producer.add(payload)
    producer.add_bulk([payload])
    producer.add(payload, id="with-id")

    assert payloads(in_stream(client, queue)) == [payload] * 3


def test_datetimes_are_written_as_timestamps_when_asked_for(
    connect: Connect, url: str, client: redis.Redis, queue: str
) -> None:
    producer = connect(url, queue=queue, datetimes=True)
    moment = datetime(2026, 11, 18, 8, 25, 1, 500_000, tzinfo=UTC)

    producer.add({"at": moment})
    producer.add_bulk([{"at": moment}])

    assert payloads(in_stream(client, queue)) == [{"at": moment}] * 2


def test_raw_payloads_are_left_alone(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    producer = connect(url, queue=queue, raw=True)

    producer.add(b"\x81\xa1a\x01")
    producer.add(memoryview(b"\x01"), id="i")
    producer.add_bulk([bytearray(b"\x02")])

    assert payloads(in_stream(client, queue)) == [{"a": 1}, 1, 2]


@pytest.mark.parametrize(
    "retry",
    [
        RetryOverride(),
        RetryOverride(0),
        RetryOverride(2**32 - 1),
        RetryOverride(None, Backoff.fixed(250)),
        RetryOverride(3, Backoff.fixed(1, max_delay_ms=2, jitter_ms=3)),
        RetryOverride(3, Backoff.exponential(100)),
    ],
    ids=repr,
)
def test_retry_overrides_arrive_as_they_were_given(
    producer: Any, client: redis.Redis, queue: str, retry: RetryOverride
) -> None:
    producer.add(1, retry=retry)
    producer.add(1, id="i", retry=retry)
    producer.add_bulk([1], retry=retry)
    producer.add_bulk_jobs([NewJob(1, retry=retry)])

    assert [job.retry for job in in_stream(client, queue)] == [retry] * 4


def test_names_of_256_bytes_are_taken_whatever_their_letters(producer: Any, client: redis.Redis, queue: str) -> None:
    names = ["n" * 256, "ñ" * 128, "🦙" * 64]

    for name in names:
        producer.add(0, name=name)

    assert [job.name for job in in_stream(client, queue)] == names


def test_keys_and_producer_id_are_told(connect: Connect, url: str, queue: str) -> None:
    one, other = connect(url, queue=queue), connect(url, queue=queue)

    assert one.stream_key == key(queue, "stream")
    assert one.delayed_key == key(queue, "delayed")
    assert one.dlq_key == key(queue, "dlq")
    assert uuid.UUID(one.producer_id).version == 4
    assert one.producer_id != other.producer_id


def test_a_new_producer_has_not_talked_to_the_server(connect: Connect, queue: str) -> None:
    connect("redis://127.0.0.1:1/0", queue=queue)


def test_repr_and_options_do_not_show_the_password(connect: Connect) -> None:
    producer = connect("redis://user:hunter2@localhost:6379/0", queue="q")

    assert "hunter2" not in repr(producer)
    assert "localhost:6379" in repr(producer)


def test_a_closed_producer_connects_again_when_it_is_used(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add(1)
    producer.close()
    producer.close()

    producer.add(2)

    assert payloads(in_stream(client, queue)) == [1, 2]


# Ids that are taken


def test_an_id_added_twice_gives_one_job(producer: Any, client: redis.Redis, queue: str) -> None:
    assert producer.add(1, id="i") == "i"
    assert producer.add(2, id="i") == "i"

    assert payloads(in_stream(client, queue)) == [1]


def test_an_id_stays_taken_after_its_job_is_gone(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add(1, id="i")
    client.delete(producer.stream_key)

    producer.add(2, id="i")

    assert in_stream(client, queue) == []


@pytest.mark.parametrize("first", ["now", "later"])
@pytest.mark.parametrize("second", ["now", "later"])
def test_an_id_is_taken_for_immediate_and_delayed_adds_alike(
    producer: Any, client: redis.Redis, queue: str, first: str, second: str
) -> None:
    for kind, payload in ((first, 1), (second, 2)):
        if kind == "now":
            producer.add(payload, id="i")
        else:
            producer.add_in(60_000, payload, id="i")

    assert payloads(in_stream(client, queue) + in_delayed(client, queue)) == [1]


def test_an_id_is_taken_for_other_producers_too(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    connect(url, queue=queue).add(1, id="i")
    connect(url, queue=queue).add(2, id="i")
    connect(url, queue=queue).add_bulk_jobs([NewJob(3, id="i"), NewJob(4, id="j")])

    assert payloads(in_stream(client, queue)) == [1, 4]


def test_an_id_is_not_taken_in_another_queue(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    connect(url, queue=queue).add(1, id="i")
    connect(url, queue=f"{queue}-b").add(2, id="i")

    assert payloads(in_stream(client, f"{queue}-b")) == [2]
    client.delete(*keys_of(client, f"{queue}-b"))


def test_an_id_is_remembered_over_a_thousand_other_adds(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add(1, id="i")
    producer.add_bulk(range(1000))
    producer.add_bulk_jobs([NewJob(n, id=f"other-{n}") for n in range(1000)])

    producer.add(2, id="i")

    assert ids(in_stream(client, queue)).count("i") == 1
    assert client.xlen(producer.stream_key) == 2001


def test_an_id_is_free_again_after_dedup_ttl(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    producer = connect(url, queue=queue, dedup_ttl="1s")
    producer.add(1, id="i")
    producer.add(2, id="i")

    eventually(lambda: not client.exists(key(queue, "dlid:i")))
    producer.add(3, id="i")

    assert payloads(in_stream(client, queue)) == [1, 3]


def test_an_id_is_remembered_for_a_day_by_default(producer: Any, client: redis.Redis, queue: str) -> None:
    producer.add(1, id="i")

    assert DAY_S - 10 <= client.ttl(key(queue, "dlid:i")) <= DAY_S
    assert keys_of(client, queue) == [key(queue, "dlid:i"), key(queue, "stream")]


def test_threads_that_race_for_ids_add_each_once(producer: Any, client: redis.Redis, queue: str) -> None:
    def add_all(_: int) -> None:
        for n in range(50):
            producer.add(n, id=f"i-{n}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add_all, range(8)))

    assert sorted(payloads(in_stream(client, queue))) == list(range(50))


RACER = """
import sys
from chasqui import NewJob, Producer
url, queue, me = sys.argv[1:]
with Producer(url, queue=queue) as producer:
    producer.stats()
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(200):
        if n % 3 == 0:
            producer.add(me, id=f"i-{n}")
        elif n % 3 == 1:
            producer.add_in(60_000, me, id=f"i-{n}")
        else:
            producer.add_bulk_jobs([NewJob(me, id=f"i-{n}"), NewJob(me, id=f"i-{n - 1}", delay_ms=60_000)])
"""


def test_processes_that_race_for_200_ids_add_each_once(url: str, client: redis.Redis, queue: str) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, url, queue, me], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for me in "ab"
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"

    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    codes = [racer.wait(60) for racer in racers]
    for racer in racers:
        racer.communicate()

    assert codes == [0, 0]
    assert sorted(ids(in_stream(client, queue)) + ids(in_delayed(client, queue))) == sorted(
        f"i-{n}" for n in range(200)
    )


# Around


def test_threads_share_a_producer(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    producer = connect(url, queue=queue, pool_size=2)

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(producer.add, range(200)))

    jobs = in_stream(client, queue)
    assert sorted(ids(jobs)) == sorted(made)
    assert sorted(payloads(jobs)) == list(range(200))


def test_a_forked_child_talks_on_connections_of_its_own(url: str, client: redis.Redis, queue: str) -> None:
    script = """
import os, sys, json
from chasqui import Producer
producer = Producer(sys.argv[1], queue=sys.argv[2], pool_size=1)
producer.add("before")
child = os.fork()
for n in range(100):
    producer.add([os.getpid(), n])
if child == 0:
    producer.close()
    os._exit(0)
pid, status = os.waitpid(child, 0)
producer.add("after")
producer.close()
print(json.dumps([os.getpid(), child, status]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, url, queue], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    parent, child, status = json.loads(done.stdout)
    assert status == 0
    found = payloads(in_stream(client, queue))
    assert (found[0], found[-1]) == ("before", "after")
    assert sorted(found[1:-1]) == sorted([pid, n] for pid in (parent, child) for n in range(100))


def test_the_with_block_closes_the_connections(server: EmbeddedServer, client: redis.Redis, queue: str) -> None:
    before = client.info("clients")["connected_clients"]
    with Producer(server.url, queue=queue) as producer:
        producer.add(1)
        assert client.info("clients")["connected_clients"] == before + 1

    eventually(lambda: client.info("clients")["connected_clients"] == before)
