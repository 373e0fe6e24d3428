"""QueueEvents: nothing missed after the start is pinned, whatever happens to the connection, the server, the stream."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis

from chasqui import ConfigError, ConnectionLost, OptionError, ServerError, queue_events
from chasqui.embedded import EmbeddedServer
from chasqui.protocol.events import Event, parse, resume_from
from chasqui.queue_events import QueueEvents
from tests.engine.seen import key, keys_of
from tests.proxy import CUT, DROP_REPLY, Act, Proxy
from tests.support import eventually

TS = 1794978715267
StartLike = Callable[..., EmbeddedServer]


class Reader:
    """Both colours behind one face. ``events`` is what is tested; the calls here only wait for it."""

    def __init__(self, colour: str, loop: asyncio.AbstractEventLoop, events: QueueEvents) -> None:
        self.sync, self.loop, self.events = colour == "sync", loop, events

    def resolve(self) -> str:
        return self.events.resolve() if self.sync else self._awaited(self.events.aresolve())

    def next(self) -> Event:
        return next(self.events) if self.sync else self._awaited(_anext(self.events))

    def take(self, count: int) -> list[str | None]:
        return [self.next().job_id for _ in range(count)]

    def poll(self, timeout: float = 0.0) -> list[Event]:
        return self.events.poll(timeout) if self.sync else self._awaited(self.events.apoll(timeout))

    def all(self) -> list[Event]:
        """Iterate to the end, which only ``stop()`` brings about."""

        async def collect() -> list[Event]:
            return [event async for event in self.events]

        return list(self.events) if self.sync else self._awaited(collect())

    def close(self) -> None:
        if self.sync:
            self.events.close()
        else:
            self._awaited(self.events.aclose())

    def _awaited(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(30)


async def _anext(events: QueueEvents) -> Event:
    return await anext(events)


Open = Callable[..., Reader]


@pytest.fixture
def open_reader(colour: str, event_loop_thread: asyncio.AbstractEventLoop) -> Iterator[Open]:
    """Makes readers of the test's colour, closed when it ends."""
    made: list[Reader] = []

    def make(url: str, **options: Any) -> Reader:
        options = {"reconnect_attempts": 0} | options
        made.append(Reader(colour, event_loop_thread, QueueEvents(url, **options)))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


def put(client: redis.Redis, queue: str, *ids: str, entry_id: str = "*") -> list[str]:
    """An ``active`` event for each job id; returns the ids of the entries."""
    fields = {"e": "active", "ts": str(TS), "n": "x", "attempt": "1"}
    return [client.xadd(key(queue, "events"), {"id": i, **fields}, id=entry_id).decode() for i in ids]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    return thread, answers


def blocked(client: redis.Redis) -> bool:
    """Whether somebody waits on that server."""
    return int(client.info("clients")["blocked_clients"]) > 0


# What an event is


def test_an_event_is_read_with_numbers_as_numbers(open_reader: Open, url: str, client: redis.Redis, queue: str) -> None:
    fields = {"e": "failed", "id": "j", "ts": str(TS), "n": "mail", "attempt": "2", "reason": "12", "duration_us": "7"}
    entry_id = client.xadd(key(queue, "events"), fields).decode()

    event = open_reader(url, queue=queue, start="0").next()

    assert event == Event("failed", "j", "mail", TS, {"attempt": 2, "reason": "12", "duration_us": 7}, entry_id)


@pytest.mark.parametrize(
    ("flat", "expected"),
    [
        ([b"e", b"drained", b"id", b"", b"ts", b"9"], Event("drained", None, "", 9, {}, "5-1")),
        ([b"e", b"active", b"ts", b"9"], Event("active", None, "", 9, {}, "5-1")),
        ([b"f", b"v"], Event("", None, "", 5, {"f": "v"}, "5-1")),
        ([b"ts", b"soon", b"attempt", b"many"], Event("", None, "", 5, {"ts": "soon", "attempt": "many"}, "5-1")),
        ([b"attempt", b"1_0", b"delay_ms", b" 1"], Event("", None, "", 5, {"attempt": "1_0", "delay_ms": " 1"}, "5-1")),
        ([b"attempt", "²".encode()], Event("", None, "", 5, {"attempt": "²"}, "5-1")),
        ([b"backoff_ms", b"9" * 5000], Event("", None, "", 5, {"backoff_ms": "9" * 5000}, "5-1")),
        ([b"backoff_ms", b"%d" % (2**64 - 1)], Event("", None, "", 5, {"backoff_ms": 2**64 - 1}, "5-1")),
        ([b"delay_ms", b"-3", b"ts", b"-"], Event("", None, "", 5, {"delay_ms": -3, "ts": "-"}, "5-1")),
        ([b"e", b"\xff", b"id", b"\xfe", b"n", b"\xff"], Event("�", "�", "", 5, {}, "5-1")),
        ([b"\xff", b"\xff"], Event("", None, "", 5, {"�": "�"}, "5-1")),
        ([b"e", b"active", b"e", b"dlq", b"id"], Event("active", None, "", 5, {}, "5-1")),
        (None, Event("", None, "", 5, {}, "5-1")),
    ],
    ids=repr,
)
def test_whatever_a_foreign_writer_left_there_is_an_event(flat: Any, expected: Event) -> None:
    assert parse([b"5-1", flat]) == expected


def test_malformed_entries_do_not_end_the_iteration(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    client.xadd(key(queue, "events"), {b"\xff\xfe": b"\x00"})
    client.xadd(key(queue, "events"), {"e": "", "id": "", "ts": "x"})
    put(client, queue, "good")

    reader = open_reader(url, queue=queue, start="0")

    assert reader.take(3) == [None, None, "good"]


# Where it starts, and that nothing is missed from there


def test_events_between_resolve_and_the_first_read_are_not_missed(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    put(client, queue, "before")
    reader = open_reader(url, queue=queue)

    pinned = reader.resolve()
    entries = put(client, queue, "a", "b")

    assert reader.take(2) == ["a", "b"]
    assert pinned < entries[0]


def test_the_start_can_be_pinned_before_the_stream_exists(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    reader = open_reader(url, queue=queue)

    assert reader.resolve() == "0-0"
    put(client, queue, "a")

    assert reader.take(1) == ["a"]


def test_the_start_is_pinned_once_and_not_at_every_read(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    reader = open_reader(url, queue=queue)
    assert reader.poll() == []
    for n in range(5):
        put(client, queue, f"j-{n}")
        assert [event.job_id for event in reader.poll()] == [f"j-{n}"]
        assert reader.poll() == []


def test_a_with_block_pins_the_start(url: str, client: redis.Redis, queue: str) -> None:
    async def asynchronous() -> str | None:
        async with QueueEvents(url, queue=queue) as events:
            put(client, queue, "a")
            async for event in events:
                return event.job_id
        return None

    with QueueEvents(url, queue=queue) as events:
        put(client, queue, "s")
        assert next(iter(events)).job_id == "s"
    assert asyncio.run(asynchronous()) == "a"


def test_from_zero_everything_is_read_in_order_over_many_pages(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    expected = [f"j-{n}" for n in range(333)]
    put(client, queue, *expected)

    assert open_reader(url, queue=queue, start="0").take(333) == expected


def test_another_reader_goes_on_from_the_last_id(open_reader: Open, url: str, client: redis.Redis, queue: str) -> None:
    entries = put(client, queue, *"abcdef")
    first = open_reader(url, queue=queue, start="0")
    assert first.take(2) == ["a", "b"]

    # Four more have been read by then, but not handed out.
    assert first.events.last_id == entries[1]
    second = open_reader(url, queue=queue, start=first.events.last_id)

    assert [event.job_id for event in second.poll()] == ["c", "d", "e", "f"]
    assert second.events.last_id == entries[5]
    assert first.take(1) == ["c"]


def test_the_last_id_before_any_event_is_the_start(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    (entry,) = put(client, queue, "a")
    reader = open_reader(url, queue=queue)

    assert reader.events.last_id == "$"
    reader.resolve()
    assert reader.events.last_id == entry


def test_reading_leaves_no_trace_in_the_queue(open_reader: Open, url: str, client: redis.Redis, queue: str) -> None:
    assert open_reader(url, queue=queue).poll(0.05) == []

    assert keys_of(client, queue) == []


@pytest.mark.parametrize("start", ["", "x", "-1", "1-", "1-2-3", "+", ">", "18446744073709551616", "1" * 30, " 1", "²"])
def test_a_start_that_is_no_id_is_refused(start: str) -> None:
    with pytest.raises(OptionError, match="start expects"):
        QueueEvents("redis://127.0.0.1:1", start=start)


@pytest.mark.parametrize(
    "options",
    [{"block_ms": 0}, {"block_ms": "x"}, {"start": None}, {"sart": "0"}, {"socket_timeout_ms": 499}],
    ids=repr,
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        QueueEvents("redis://127.0.0.1:1", **options)


# Polling


def test_a_poll_waits_for_the_first_event(open_reader: Open, url: str, client: redis.Redis, queue: str) -> None:
    reader = open_reader(url, queue=queue)
    reader.resolve()
    later = threading.Timer(0.4, put, [client, queue, "a"])
    later.start()

    assert [event.job_id for event in reader.poll(10)] == ["a"]
    later.join()


def test_a_poll_without_events_ends_in_time(open_reader: Open, url: str, queue: str) -> None:
    reader = open_reader(url, queue=queue)
    reader.resolve()
    started = time.monotonic()

    assert reader.poll(0.4) == []

    assert 0.39 <= time.monotonic() - started < 2


def test_a_poll_tells_silence_from_an_outage(open_reader: Open, start_like: StartLike, queue: str) -> None:
    server = start_like()
    reader = open_reader(server.url, queue=queue)
    assert reader.poll() == []
    server.kill()

    with pytest.raises(ConnectionLost):
        reader.poll(0.3)

    server.restart()
    assert reader.poll() == []


@pytest.mark.parametrize("timeout", [-1, "1", None, True, float("nan")], ids=repr)
def test_a_poll_refuses_a_timeout_that_is_none(url: str, queue: str, timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout expects"):
        QueueEvents(url, queue=queue).poll(timeout)


# Outages


def test_a_server_that_cannot_be_reached_at_first_is_an_error(open_reader: Open, queue: str) -> None:
    reader = open_reader("redis://127.0.0.1:1", queue=queue)

    with pytest.raises(ConnectionLost):
        reader.next()


def test_a_key_of_another_type_is_an_error_at_first(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    client.set(key(queue, "events"), "mine", ex=60)

    with pytest.raises(ServerError, match="WRONGTYPE"):
        open_reader(url, queue=queue).next()


@pytest.mark.parametrize("act", [pytest.param(CUT, id="cut"), pytest.param(DROP_REPLY, id="reply lost")])
@pytest.mark.parametrize("attempts", [0, 5])
def test_a_broken_connection_neither_loses_nor_doubles_events(
    open_reader: Open, proxy: Proxy, client: redis.Redis, queue: str, act: Act, attempts: int
) -> None:
    put(client, queue, *[f"j-{n}" for n in range(250)])
    reader = open_reader(proxy.url, queue=queue, start="0", reconnect_attempts=attempts)
    reader.resolve()
    for nth in (1, 2, 4):
        proxy.on("XREAD", nth=nth, act=act)

    assert reader.take(250) == [f"j-{n}" for n in range(250)]
    assert reader.poll() == []


def test_an_iteration_survives_a_restart_of_the_server(open_reader: Open, start_like: StartLike, queue: str) -> None:
    server = start_like(config={"appendonly": "yes", "appendfsync": "always"})
    with redis.Redis.from_url(server.url) as client:
        put(client, queue, "a", "b")
        reader = open_reader(server.url, queue=queue, start="0")
        assert reader.take(2) == ["a", "b"]
        thread, answers = in_thread(lambda: reader.take(2))
        eventually(lambda: blocked(client))

        server.kill()
        time.sleep(0.5)
        server.restart()
        put(client, queue, "c", "d")

        thread.join(10)
        assert answers == [["c", "d"]]


def test_events_of_a_server_that_came_back_empty_are_read(
    open_reader: Open, start_like: StartLike, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_like()
    with redis.Redis.from_url(server.url) as client:
        put(client, queue, "old")
        reader = open_reader(server.url, queue=queue, start="0")
        assert reader.take(1) == ["old"]
        thread, answers = in_thread(lambda: reader.take(2))
        eventually(lambda: blocked(client))

        with caplog.at_level(logging.INFO, "chasqui.events"):
            server.kill()
            server.restart()
            # Ids far before those that were read.
            put(client, queue, "a", entry_id="5-0")
            put(client, queue, "b", entry_id="6-0")
            thread.join(10)

    assert answers == [["a", "b"]]
    assert "cannot be read" in caplog.text
    assert "can be read again" in caplog.text
    assert "going on after 0-0" in caplog.text


def test_a_stream_made_anew_with_smaller_ids_is_read_from_its_beginning(
    open_reader: Open, url: str, client: redis.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_events, "_LOOK_MS", 1)
    put(client, queue, "old")
    reader = open_reader(url, queue=queue, start="0", block_ms=20)
    assert reader.take(1) == ["old"]

    client.delete(key(queue, "events"))
    put(client, queue, "a", entry_id="5-0")

    assert reader.take(1) == ["a"]
    assert reader.events.last_id == "5-0"


def test_a_stream_that_lost_its_end_is_not_read_again(
    open_reader: Open, url: str, client: redis.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_events, "_LOOK_MS", 1)
    for n in (1, 2, 3):
        put(client, queue, f"j-{n}", entry_id=f"{n}-0")
    reader = open_reader(url, queue=queue, start="0", block_ms=20)
    assert reader.take(3) == ["j-1", "j-2", "j-3"]

    # As after a crash with appendfsync everysec: the third is gone, and its id is given out again.
    client.delete(key(queue, "events"))
    for n in (1, 2):
        put(client, queue, f"j-{n}", entry_id=f"{n}-0")
    eventually(lambda: reader.poll(0.05) == [] and reader.events.last_id == "2-0")
    put(client, queue, "new", entry_id="3-0")

    assert reader.take(1) == ["new"]


def test_an_id_of_an_earlier_life_of_the_stream_starts_at_its_beginning(
    open_reader: Open, url: str, client: redis.Redis, queue: str
) -> None:
    put(client, queue, "a", entry_id="5-0")

    reader = open_reader(url, queue=queue, start="1794978715257-0")

    assert reader.take(1) == ["a"]


@pytest.mark.parametrize(
    ("position", "tail", "seen", "expected"),
    [
        ("5-1", "5-1", [], "5-1"),
        ("5-9", "5-10", [], "5-9"),
        ("9-0", "10-0", [], "9-0"),
        ("5-10", "5-9", [], "0-0"),
        ("5-10", "5-9", ["5-9"], "5-9"),
        ("5-10", "0-0", ["5-9"], "0-0"),
        ("0-0", "0-0", [], "0-0"),
    ],
)
def test_where_reading_goes_on(position: str, tail: str, seen: list[str], expected: str) -> None:
    assert resume_from(position, tail, seen) == expected


# Stopping


def test_a_stop_ends_a_blocked_iteration_promptly(open_reader: Open, url: str, client: redis.Redis, queue: str) -> None:
    put(client, queue, "a")
    reader = open_reader(url, queue=queue, start="0", block_ms=20_000)
    thread, answers = in_thread(reader.all)
    eventually(lambda: reader.events.last_id != "0-0" and blocked(client))

    started = time.monotonic()
    reader.events.stop()
    thread.join(10)

    assert time.monotonic() - started < 1
    assert [event.job_id for event in answers[0]] == ["a"]


def test_a_stop_ends_an_iteration_that_waits_for_the_server(
    open_reader: Open, start_like: StartLike, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_like()
    reader = open_reader(server.url, queue=queue, reconnect_attempts=5)
    reader.resolve()
    server.kill()
    thread, answers = in_thread(reader.all)
    eventually(lambda: "cannot be read" in caplog.text)

    started = time.monotonic()
    reader.events.stop()
    thread.join(10)

    assert time.monotonic() - started < 1
    assert answers == [[]]


def test_a_stop_before_the_start_ends_it_at_once(open_reader: Open, url: str, queue: str) -> None:
    reader = open_reader(url, queue=queue)

    reader.events.stop()

    assert reader.all() == []
    assert reader.poll(5) == []


def test_a_stop_from_inside_the_loop_ends_it_and_the_rest_can_be_read_later(
    url: str, client: redis.Redis, queue: str
) -> None:
    put(client, queue, *"abc")
    events = QueueEvents(url, queue=queue, start="0")
    seen = []
    for event in events:
        seen.append(event.job_id)
        events.stop()

    assert seen == ["a"]
    with QueueEvents(url, queue=queue, start=events.last_id) as later:
        assert [event.job_id for event in later.poll()] == ["b", "c"]


def test_a_stop_from_another_task_ends_an_async_for(url: str, queue: str) -> None:
    async def scenario() -> float:
        events = QueueEvents(url, queue=queue, block_ms=20_000)
        asyncio.get_running_loop().call_later(0.2, events.stop)
        started = time.monotonic()
        async for _ in events:
            raise AssertionError("there was no event")
        return time.monotonic() - started

    assert asyncio.run(scenario()) < 2


def test_closing_from_another_thread_ends_the_iteration_and_its_connections(
    open_reader: Open, start_like: StartLike, queue: str
) -> None:
    server = start_like()
    with redis.Redis.from_url(server.url) as client:
        ours = len(client.client_list())
        reader = open_reader(server.url, queue=queue, block_ms=20_000)
        thread, answers = in_thread(reader.all)
        eventually(lambda: blocked(client))

        reader.close()
        thread.join(5)

        assert answers == [[]]
        eventually(lambda: len(client.client_list()) == ours)


def test_an_anext_that_was_cancelled_loses_nothing(url: str, client: redis.Redis, queue: str) -> None:
    async def scenario() -> list[str | None]:
        async with QueueEvents(url, queue=queue, block_ms=20_000) as events:
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(events), 0.05)
            put(client, queue, "a", "b")
            return [(await anext(events)).job_id, (await anext(events)).job_id]

    assert asyncio.run(scenario()) == ["a", "b"]


def test_the_shortest_time_out_of_the_socket_is_longer_than_a_blocking_read(
    open_reader: Open, url: str, client: redis.Redis, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = open_reader(url, queue=queue, socket_timeout_ms=500)

    assert reader.poll(1.2) == []
    put(client, queue, "a")

    assert reader.take(1) == ["a"]
    assert caplog.text == ""


def test_the_password_of_the_url_is_not_shown() -> None:
    assert "secret" not in repr(QueueEvents("redis://:secret@127.0.0.1:1/0", queue="q"))
