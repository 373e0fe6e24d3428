"""Dead letters put back one by one: repaired, once, at a pace, and not into a full queue."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgpack
import pytest
import redis

from chasqui import ConfigError, PayloadError, QueueFull
from chasqui.options import ConnectionOptions
from chasqui.redis_io import Link
from chasqui.replays import Pace, Repaired, Replays
from tests.engine.seen import an_envelope, in_stream, put_dead_letter
from tests.proxy import DROP_REPLY, Proxy


@pytest.fixture
def link(url: str) -> Iterator[Link]:
    made = Link(ConnectionOptions(url=url))
    yield made
    made.close()


def dead(client: redis.Redis, queue: str, count: int) -> list[str]:
    return [put_dead_letter(client, queue, an_envelope(f"j{i}", i, attempt=2), n="old") for i in range(count)]


def test_a_letter_goes_back_with_what_was_repaired_and_its_runs_forgotten(
    link: Link, client: redis.Redis, queue: str
) -> None:
    first, second, _ = dead(client, queue, 3)
    replays = Replays(link, queue)
    letters = [Repaired(first), Repaired(second, msgpack.packb("new"), "new")]

    assert replays.put_back(letters) == 2
    assert replays.put_back(letters) == 0

    found = [(fields[b"d"], fields[b"n"]) for _, fields in client.xrange(f"{{chasqui:{queue}}}:stream")]
    assert found == [(an_envelope("j0", 0), b"old"), (an_envelope("j1", "new"), b"new")]
    assert client.xlen(f"{{chasqui:{queue}}}:dlq") == 1


def test_a_lost_reply_puts_nothing_back_twice(server: object, client: redis.Redis, queue: str) -> None:
    ids = dead(client, queue, 5)
    with Proxy(server.port) as proxy:  # type: ignore[attr-defined]
        link = Link(ConnectionOptions(url=proxy.url, reconnect_initial_ms=5))
        replays = Replays(link, queue)
        replays.put_back([Repaired(ids[0])])
        proxy.on("EVALSHA", act=DROP_REPLY)
        replays.put_back([Repaired(i) for i in ids[1:]])
        link.close()

    assert client.xlen(f"{{chasqui:{queue}}}:stream") == 5


def test_a_pace_is_kept_by_all_who_share_it(link: Link, client: redis.Redis, queue: str) -> None:
    letters = [Repaired(i) for i in dead(client, queue, 30)]
    pace = Pace(50, "p")
    start = time.monotonic()

    Replays(link, queue, pace=pace).put_back(letters[:15])
    Replays(link, queue, pace=pace).put_back(letters[15:])

    assert time.monotonic() - start > 0.4
    assert client.xlen(f"{{chasqui:{queue}}}:stream") == 30


def test_a_full_queue_takes_what_fits_and_the_rest_stays(link: Link, client: redis.Redis, queue: str) -> None:
    letters = [Repaired(i) for i in dead(client, queue, 5)]

    with pytest.raises(QueueFull, match="stay where they are"):
        Replays(link, queue, max_stream_len=3, wait_for_room_ms=300).put_back(letters)

    assert (client.xlen(f"{{chasqui:{queue}}}:stream"), client.xlen(f"{{chasqui:{queue}}}:dlq")) == (3, 2)


def test_what_cannot_be_a_job_is_refused_and_stays(link: Link, client: redis.Redis, queue: str) -> None:
    broken = put_dead_letter(client, queue, b"\xc1")
    (large,) = dead(client, queue, 1)

    with pytest.raises(ConfigError, match="is no job"):
        Replays(link, queue).put_back([Repaired(broken)])
    with pytest.raises(PayloadError, match="max_payload_bytes"):
        Replays(link, queue, max_payload_bytes=100).put_back([Repaired(large, b"x" * 200)])

    assert client.xlen(f"{{chasqui:{queue}}}:dlq") == 2
    assert in_stream(client, queue) == []
