"""write_events: the bytes that native readers expect, in order, in few and bounded steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from chasqui import ConnectionLost, ServerError
from chasqui.embedded import EmbeddedServer
from chasqui.options import ConnectionOptions
from chasqui.protocol.events import PIECE_EVENTS, Alike, Line, encode, encode_run, encode_runs, write
from chasqui.protocol.flow import Flow, command
from chasqui.protocol.keys import Keys
from chasqui.redis_io import Link
from tests.proxy import DROP_REPLY, Proxy

TS = 1794978715267


@pytest.fixture
def link(url: str) -> Iterator[Link]:
    opened = Link(ConnectionOptions(url=url))
    yield opened
    opened.close()


@pytest.fixture
def keys(queue: str) -> Keys:
    return Keys(queue)


def stored(link: Link, keys: Keys) -> list[list[bytes]]:
    """The fields of all events, flat and raw: order and doubles would show."""

    def all_of_them() -> Flow[Any]:
        return (yield command("XRANGE", keys.events, "-", "+"))

    return [entry[1] for entry in link.run(all_of_them())]


def numbered(count: int) -> list[Line]:
    return [encode("active", f"j-{n}", TS, "x", ("attempt", 1)) for n in range(count)]


EXAMPLES: list[tuple[Line, str]] = [
    (encode("active", "j-ok", TS, "ok", ("attempt", 1)), f"e active id j-ok ts {TS} n ok attempt 1"),
    (
        encode("completed", "j-none", TS, "", ("attempt", 1, "duration_us", 438)),
        f"e completed id j-none ts {TS} attempt 1 duration_us 438",
    ),
    (
        encode("failed", "j-fail", TS, "f", ("attempt", 1, "reason", "boom", "duration_us", 127)),
        f"e failed id j-fail ts {TS} n f attempt 1 reason boom duration_us 127",
    ),
    (
        encode("retry-scheduled", "j-fail", TS, "f", ("attempt", 2, "backoff_ms", 151)),
        f"e retry-scheduled id j-fail ts {TS} n f attempt 2 backoff_ms 151",
    ),
    (
        encode("dlq", "j-un", TS, "u", ("attempt", 1, "reason", "unrecoverable")),
        f"e dlq id j-un ts {TS} n u attempt 1 reason unrecoverable",
    ),
    (encode("drained", "", TS, ""), f"e drained id  ts {TS}"),
    (encode("waiting", "j-fail3", TS, ""), f"e waiting id j-fail3 ts {TS}"),
]


@pytest.mark.parametrize(
    ("event", "text"), EXAMPLES, ids=lambda value: value.split()[1] if isinstance(value, str) else ""
)
def test_an_event_is_stored_byte_for_byte_as_the_format_says(link: Link, keys: Keys, event: Line, text: str) -> None:
    link.run(write(keys, [event], 100))

    assert stored(link, keys) == [text.encode().split(b" ")]


@pytest.mark.parametrize("number", [0, 1, 2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1])
def test_a_number_is_written_in_all_its_digits(link: Link, keys: Keys, number: int) -> None:
    link.run(write(keys, [encode("retry-scheduled", "j", TS, "", ("attempt", 2, "backoff_ms", number))], 100))

    assert stored(link, keys)[0][-1] == b"%d" % number


def test_text_of_any_kind_is_written_as_utf8_and_a_lone_surrogate_does_not_stop_the_batch(
    link: Link, keys: Keys
) -> None:
    odd = encode("failed", "ñ", TS, "名", ("attempt", 1, "reason", "a\x00b\n\udcff", "duration_us", 1))

    link.run(write(keys, [encode("active", "a", TS, ""), odd, encode("active", "b", TS, "")], 100))

    written = stored(link, keys)
    assert [fields[3] for fields in written] == [b"a", "ñ".encode(), b"b"]
    assert written[1][7] == "名".encode()
    assert written[1][11] == b"a\x00b\n?"


def test_events_stand_in_the_order_given_over_all_steps(link: Link, keys: Keys) -> None:
    count = 2 * PIECE_EVENTS + 1

    link.run(write(keys, numbered(count), 100_000))

    assert [fields[3] for fields in stored(link, keys)] == [b"j-%d" % n for n in range(count)]


def test_nothing_to_write_means_nothing_sent(link: Link, keys: Keys, client: redis.Redis) -> None:
    link.run(write(keys, [], 100))

    assert not client.exists(keys.events)


def test_the_stream_is_trimmed_about_at_max_len(link: Link, keys: Keys, client: redis.Redis) -> None:
    link.run(write(keys, numbered(1500), 200))

    assert 200 <= client.xlen(keys.events) <= 400
    assert stored(link, keys)[-1][3] == b"j-1499"


@pytest.mark.parametrize("name", ["", "ok"])
@pytest.mark.parametrize("attempt", [1, 12, 2**32])
def test_the_quick_way_gives_the_same_bytes(name: str, attempt: int) -> None:
    active, completed = ("attempt", attempt), ("attempt", attempt, "duration_us", 438)

    assert encode_run("active", "j-ñ", TS, name, attempt) == encode("active", "j-ñ", TS, name, active)
    assert encode_run("completed", "j", TS, name, attempt, 438) == encode("completed", "j", TS, name, completed)


@pytest.mark.parametrize(
    ("runs", "kind"),
    [
        ([(f"j-{n:04}", "ok", 2, None) for n in range(2 * PIECE_EVENTS + 1)], Alike),
        ([(f"j-{n}", "", 0, 438) for n in range(3)], Alike),
        ([("ñ\udcff", "名", 0, 7), ("ab", "名", 0, 7)], Alike),
        ([("a", "ok", 0, None), ("b", "no", 0, None)], list),
        ([("a", "ok", 0, None), ("b", "ok", 1, None)], list),
        ([("a", "ok", 0, 1), ("b", "ok", 0, 2)], list),
        ([], list),
    ],
)
def test_runs_of_a_batch_are_written_as_one_by_one(link: Link, keys: Keys, runs: list[Any], kind: type) -> None:
    lines = encode_runs("completed", TS, runs)
    assert type(lines) is kind

    link.run(write(keys, lines, 100_000))
    together = stored(link, keys)
    link.run(write(keys, [encode_run("completed", i, TS, name, n + 1, took) for i, name, n, took in runs], 100_000))

    assert [*together, *together] == stored(link, keys)
    assert len(together) == len(runs)


def test_a_key_of_another_type_is_an_error_and_stays_as_it_is(link: Link, keys: Keys, client: redis.Redis) -> None:
    client.set(keys.events, "mine", ex=60)

    with pytest.raises(ServerError, match="WRONGTYPE"):
        link.run(write(keys, numbered(2), 100))

    assert client.get(keys.events) == b"mine"


def test_events_whose_reply_is_lost_are_not_written_twice(
    server: EmbeddedServer, keys: Keys, client: redis.Redis
) -> None:
    assert server.port
    with Proxy(server.port) as proxy:
        link = Link(ConnectionOptions(url=proxy.url))
        link.run(write(keys, numbered(1), 100))
        proxy.on("XADD", nth=4, act=DROP_REPLY)

        with pytest.raises(ConnectionLost) as caught:
            link.run(write(keys, numbered(10), 100))

        assert caught.value.sent is True
        ids = [fields[b"id"] for _, fields in client.xrange(keys.events)]
        # Ours before, and what was carried out up to the lost reply; nothing was sent again.
        assert ids == [b"j-0", *(b"j-%d" % n for n in range(len(ids) - 1))]
        assert 3 <= len(ids) - 1 <= 4
        link.close()


def test_events_of_a_batch_whose_reply_is_lost_are_not_written_twice(
    server: EmbeddedServer, keys: Keys, client: redis.Redis
) -> None:
    assert server.port
    alike = encode_runs("active", TS, [(f"j-{n}", "x", 0, None) for n in range(10)])
    with Proxy(server.port) as proxy:
        link = Link(ConnectionOptions(url=proxy.url))
        link.run(write(keys, alike, 100))
        proxy.on("EVALSHA", act=DROP_REPLY)

        with pytest.raises(ConnectionLost):
            link.run(write(keys, alike, 100))

        assert client.xlen(keys.events) == 20
        link.close()
