"""Every public call with arguments that are wrong: a typed error that names the argument, and nothing written."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import redis

from chasqui import ChasquiError, ConfigError, NewJob, OptionError, PayloadError, RetryOverride
from tests.engine.conftest import Connect
from tests.engine.seen import in_delayed, in_stream, keys_of

Call = Callable[[Any], Any]
Row = tuple[str, Call, type[ChasquiError], str]

DAY_MS = 24 * 3600 * 1000
LONG_NAME, LONG_UTF8_NAME, LONG_ID = "n" * 257, "ñ" * 128 + "n", "i" * 1025
SURROGATE = "\ud800"
NESTED: list[Any] = []
NESTED.append(NESTED)
ID = "i"


def rows(what: str, match: str, values: list[Any], make: Callable[[Any], Call], error: Any = ConfigError) -> list[Row]:
    """The same call with each of the values in its place."""
    return [(f"{what} {value!r:.30}", make(value), error, match) for value in values]


BAD_NAMES = [LONG_NAME, LONG_UTF8_NAME, SURROGATE, b"n", 5, None]
BAD_IDS = ["", " \t\n", LONG_ID, SURROGATE, b"i", 5]
BAD_RETRIES = [3, {"max_attempts": 3}, "x"]
BAD_DELAYS = [-1, timedelta(microseconds=-1), 1.5, "5", None, True, 31 * DAY_MS, timedelta(days=31), 10**30]
BAD_MOMENTS = [
    1.5,
    "2026-01-01",
    None,
    True,
    -1,
    datetime(1969, 1, 1, tzinfo=UTC),
    datetime.max.replace(tzinfo=UTC),
    10**30,
]
BAD_LISTS = ["text", b"bytes", {"a": 1}, 5, None]
BAD_COUNTS = [-1, 1.5, "5", True, 2**70]
BAD_ENTRY_IDS = ["", "5", "-", "1-", "-1", "a-b", "1-1-1", "1" * 50 + "-0", "-", "+", "(1-0", 5, b"1-0"]

TABLE: list[Row] = [
    *rows("add name", "name", BAD_NAMES, lambda v: lambda p: p.add(1, name=v)),
    *rows("add id", "id", [*BAD_IDS, "\u2003"], lambda v: lambda p: p.add(1, id=v)),
    *rows("add retry", "retry", BAD_RETRIES, lambda v: lambda p: p.add(1, retry=v)),
    *rows("add_bulk payloads", "payloads", BAD_LISTS, lambda v: lambda p: p.add_bulk(v)),
    *rows("add_bulk name", "name", BAD_NAMES, lambda v: lambda p: p.add_bulk([1], name=v)),
    *rows("add_bulk retry", "retry", BAD_RETRIES, lambda v: lambda p: p.add_bulk([1], retry=v)),
    *rows("add_bulk_named items", "items", BAD_LISTS, lambda v: lambda p: p.add_bulk_named(v)),
    *rows("add_bulk_named name", "name", BAD_NAMES, lambda v: lambda p: p.add_bulk_named([("a", 1), (v, 2)])),
    *rows(
        "add_bulk_named pair",
        "items",
        ["", "ab", (), ("a",), ("a", 1, 2), 5, None, {"name": "a"}],
        lambda v: lambda p: p.add_bulk_named([("a", 1), v]),
    ),
    *rows("add_bulk_jobs jobs", "jobs", BAD_LISTS, lambda v: lambda p: p.add_bulk_jobs(v)),
    *rows("add_bulk_jobs job", r"jobs\[1\]", [1, None, {}], lambda v: lambda p: p.add_bulk_jobs([NewJob(1), v])),
    *rows(
        "add_bulk_jobs job with ids",
        r"jobs\[1\]",
        [1, None],
        lambda v: lambda p: p.add_bulk_jobs([NewJob(1, id=ID), v]),
    ),
    *rows(
        "NewJob name",
        r"jobs\[1\].*name",
        BAD_NAMES,
        lambda v: lambda p: p.add_bulk_jobs([NewJob(1), NewJob(1, name=v)]),
    ),
    *rows("NewJob id", r"jobs\[1\].*id", BAD_IDS, lambda v: lambda p: p.add_bulk_jobs([NewJob(1), NewJob(1, id=v)])),
    *rows(
        "NewJob retry",
        r"jobs\[1\].*retry",
        BAD_RETRIES,
        lambda v: lambda p: p.add_bulk_jobs([NewJob(1), NewJob(1, retry=v)]),
    ),
    *rows(
        "NewJob delay_ms",
        r"jobs\[1\].*delay",
        [-1, 1.5, "5", True, 31 * DAY_MS],
        lambda v: lambda p: p.add_bulk_jobs([NewJob(1), NewJob(1, delay_ms=v)]),
    ),
    *rows(
        "NewJob run_at_ms",
        r"jobs\[1\].*(run_at_ms|delay)",
        [-1, 1.5, "5", True, 10**15],
        lambda v: lambda p: p.add_bulk_jobs([NewJob(1), NewJob(1, run_at_ms=v)]),
    ),
    *rows(
        "NewJob both times",
        r"jobs\[1\].*delay_ms and run_at_ms",
        [0, 5],
        lambda v: lambda p: p.add_bulk_jobs([NewJob(1), NewJob(1, delay_ms=v, run_at_ms=v)]),
    ),
    *rows("add_in delay", "delay", BAD_DELAYS, lambda v: lambda p: p.add_in(v, 1)),
    *rows("add_in delay with id", "delay", BAD_DELAYS, lambda v: lambda p: p.add_in(v, 1, id=ID)),
    *rows("add_in id", "id", BAD_IDS, lambda v: lambda p: p.add_in(1000, 1, id=v)),
    *rows("add_in name", "name", BAD_NAMES, lambda v: lambda p: p.add_in(1000, 1, name=v)),
    *rows("add_in retry", "retry", BAD_RETRIES, lambda v: lambda p: p.add_in(1000, 1, retry=v)),
    *rows("add_at when", "when|1970|delay", BAD_MOMENTS, lambda v: lambda p: p.add_at(v, 1)),
    *rows("add_at id", "id", BAD_IDS, lambda v: lambda p: p.add_at(10**12, 1, id=v)),
    *rows("add_at name", "name", BAD_NAMES, lambda v: lambda p: p.add_at(10**12, 1, name=v)),
    *rows("add_in_bulk delay", "delay", BAD_DELAYS, lambda v: lambda p: p.add_in_bulk(v, [1])),
    *rows("add_in_bulk payloads", "payloads", BAD_LISTS, lambda v: lambda p: p.add_in_bulk(5, v)),
    *rows("add_in_bulk name", "name", BAD_NAMES, lambda v: lambda p: p.add_in_bulk(5, [1], name=v)),
    *rows("add_in_bulk ids", "ids", ["text", 5, ["a"], ["a"] * 3], lambda v: lambda p: p.add_in_bulk(5, [1, 2], ids=v)),
    *rows("add_in_bulk id", "id", BAD_IDS, lambda v: lambda p: p.add_in_bulk(5, [1, 2], ids=["a", v])),
    *rows("cancel_delayed id", "id", [*BAD_IDS, None], lambda v: lambda p: p.cancel_delayed(v)),
    *rows("cancel_delayed_bulk ids", "ids", BAD_LISTS, lambda v: lambda p: p.cancel_delayed_bulk(v)),
    *rows("cancel_delayed_bulk id", "id", BAD_IDS, lambda v: lambda p: p.cancel_delayed_bulk(["a", v])),
    *rows("peek_dlq limit", "limit", [*BAD_COUNTS, None], lambda v: lambda p: p.peek_dlq(v)),
    *rows(
        "peek_dlq after",
        "after",
        [*BAD_ENTRY_IDS, "٣-٠", "18446744073709551616-0"],
        lambda v: lambda p: p.peek_dlq(after=v),
    ),
    *rows("replay_dlq limit", "limit", [*BAD_COUNTS, None], lambda v: lambda p: p.replay_dlq(v)),
    *rows("replay_dlq ids", "ids", ["1-1", 5], lambda v: lambda p: p.replay_dlq(ids=v)),
    *rows("replay_dlq id", r"ids\[1\]", BAD_ENTRY_IDS, lambda v: lambda p: p.replay_dlq(ids=["1-1", v])),
    *rows("purge_dlq limit", "limit", BAD_COUNTS, lambda v: lambda p: p.purge_dlq(v)),
    *rows("purge_dlq id", r"ids\[1\]", BAD_ENTRY_IDS, lambda v: lambda p: p.purge_dlq(ids=["1-1", v])),
    *rows("get_result id", "id", [*BAD_IDS, None], lambda v: lambda p: p.get_result(v)),
    *rows("get_result_bulk ids", "ids", BAD_LISTS, lambda v: lambda p: p.get_result_bulk(v)),
    *rows("wait_for_result id", "id", BAD_IDS, lambda v: lambda p: p.wait_for_result(v, 1)),
    *rows(
        "wait_for_result timeout",
        "timeout",
        [0, -1, float("nan"), "5", None, True, timedelta(0)],
        lambda v: lambda p: p.wait_for_result("i", v),
    ),
    *rows("stats group", "group", ["", None, 5, b"g"], lambda v: lambda p: p.stats(group=v)),
]

UNPACKABLE: list[tuple[Any, str]] = [
    (object(), "payload is a object"),
    ({1, 2}, "payload is a set"),
    ({"a": [1, Decimal("1.5")]}, r"payload\['a'\]\[1\] is a Decimal.*str\(value\)"),
    ([uuid.UUID(int=0)], r"payload\[0\] is a UUID"),
    ({"when": datetime(2026, 1, 1, tzinfo=UTC)}, r"payload\['when'\] is a datetime.*datetimes=True"),
    (2**64, "payload is a number of more than 64 bits"),
    ([-(2**63) - 1], r"payload\[0\] is a number of more than 64 bits"),
    ("\ud800", "surrogate"),
    ({(1, object()): 1}, "key"),
    (NESTED, "nested deeper"),
]
UNPACKABLE_IN: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    ("add", lambda p, v: p.add(v), ""),
    ("add with id", lambda p, v: p.add(v, id=ID), ""),
    ("add_bulk", lambda p, v: p.add_bulk([1] * 300 + [v]), r"payloads\[300\]: "),
    ("add_bulk_named", lambda p, v: p.add_bulk_named([("a", 1), ("b", v)]), r"\[1\]: "),
    ("add_bulk_jobs", lambda p, v: p.add_bulk_jobs([NewJob(1), NewJob(v)]), r"jobs\[1\]: "),
    ("add_bulk_jobs with ids", lambda p, v: p.add_bulk_jobs([NewJob(1, id="a"), NewJob(v, id="b")]), r"jobs\[1\]: "),
    ("add_in", lambda p, v: p.add_in(1000, v), ""),
    ("add_at", lambda p, v: p.add_at(10**12, v), ""),
    ("add_in_bulk", lambda p, v: p.add_in_bulk(1000, [1, v]), r"payloads\[1\]: "),
    ("add_in_bulk with ids", lambda p, v: p.add_in_bulk(1000, [1, v], ids=["a", "b"]), r"\[1\]: "),
]
each_way = pytest.mark.parametrize(
    ("add", "place"), [pytest.param(add, place, id=name) for name, add, place in UNPACKABLE_IN]
)


@pytest.mark.parametrize(
    ("call", "error", "match"), [pytest.param(call, error, match, id=name) for name, call, error, match in TABLE]
)
def test_a_wrong_argument_is_named_and_nothing_is_written(
    producer: Any, client: redis.Redis, queue: str, call: Call, error: type[ChasquiError], match: str
) -> None:
    with pytest.raises(error, match=match) as caught:
        call(producer)

    assert isinstance(caught.value, ValueError)
    assert keys_of(client, queue) == []


@each_way
@pytest.mark.parametrize(("payload", "match"), UNPACKABLE, ids=[match for _, match in UNPACKABLE])
def test_a_payload_that_cannot_be_packed_is_named_and_nothing_is_written(
    producer: Any,
    client: redis.Redis,
    queue: str,
    add: Callable[[Any, Any], Any],
    place: str,
    payload: Any,
    match: str,
) -> None:
    with pytest.raises(PayloadError, match=f"{place}.*{match}") as caught:
        add(producer, payload)

    assert caught.value.code == "CMQ-002"
    assert keys_of(client, queue) == []


@each_way
def test_raw_takes_bytes_only(
    connect: Connect, url: str, client: redis.Redis, queue: str, add: Callable[[Any, Any], Any], place: str
) -> None:
    producer = connect(url, queue=queue, raw=True)

    with pytest.raises(PayloadError, match=r"expects MessagePack bytes, because raw=True; got \w+"):
        add(producer, {"a": 1})

    assert keys_of(client, queue) == []


@each_way
def test_a_payload_over_the_limit_is_refused_and_one_just_at_it_is_taken(
    connect: Connect, url: str, client: redis.Redis, queue: str, add: Callable[[Any, Any], Any], place: str
) -> None:
    # Envelope: array, id (26 letters of ours, or one of the caller's), bin header, payload, time, attempt.
    id_size = 2 if "with id" in _name_of(add) else 27
    around = 1 + id_size + 3 + 3 + 9 + 1
    producer = connect(url, queue=queue, max_payload_bytes=2000)

    with pytest.raises(PayloadError, match=f"{place}.*2001 bytes.*max_payload_bytes.*2000"):
        add(producer, b"x" * (2001 - around))

    assert keys_of(client, queue) == []
    add(producer, b"x" * (2000 - around))
    largest = max(
        len(data)
        for data in [fields[b"d"] for _, fields in client.xrange(producer.stream_key)]
        + [member[4:] for member in client.zrange(producer.delayed_key, 0, -1)]
    )
    assert largest == 2000
    assert in_stream(client, queue) + in_delayed(client, queue)


def test_the_limit_counts_the_retry_override(connect: Connect, url: str, client: redis.Redis, queue: str) -> None:
    producer = connect(url, queue=queue, max_payload_bytes=100)
    fits = b"x" * (100 - 40 - 2)

    producer.add(fits)
    producer.add_bulk([fits])

    for add in (producer.add, lambda payload, retry: producer.add_bulk([payload], retry=retry)):
        with pytest.raises(PayloadError, match="103 bytes"):
            add(fits, retry=RetryOverride(1))
    assert client.xlen(producer.stream_key) == 2


def test_a_delay_may_be_the_longest_allowed_and_its_last_second(
    connect: Connect, url: str, client: redis.Redis, queue: str
) -> None:
    producer = connect(url, queue=queue, max_delay_secs=60)

    producer.add_in(60_999, 1)

    with pytest.raises(ConfigError, match=r"61 s.*max_delay_secs.*60"):
        producer.add_in(61_000, 1)
    assert len(in_delayed(client, queue)) == 1


@pytest.mark.parametrize("queue_name", ["", " ", "a{b", "a}b", "a\nb", "a\x7f", "q" * 257, "\ud800", 5, None], ids=repr)
def test_a_bad_queue_name_is_refused_at_once(connect: Connect, queue_name: Any) -> None:
    with pytest.raises(ConfigError, match="queue"):
        connect("redis://127.0.0.1:1/0", queue=queue_name)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_stream_length": 5}, "max_stream_length.*did you mean max_stream_len"),
        ({"overflow": "drop"}, "overflow expects one of reject, block, trim, got 'drop'"),
        ({"max_stream_len": 0}, "max_stream_len expects .*at least 1, got 0"),
        ({"dedup_ttl": "soon"}, "dedup_ttl expects"),
        ({"url": 5}, "url expects"),
        ({"url": "http://u:hunter2@h"}, "url expects one of"),
        ({"tls_ca": "/x"}, "tls_ca"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_at_once(connect: Connect, options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match) as caught:
        connect(**{"url": "redis://127.0.0.1:1/0", "queue": "q"} | options)

    assert "hunter2" not in str(caught.value)


def _name_of(add: Callable[[Any, Any], Any]) -> str:
    return next(name for name, known, _ in UNPACKABLE_IN if known is add)


@pytest.mark.parametrize("moment", [2**53 + 1, 2**70])
def test_a_time_that_no_score_can_hold_is_refused_also_where_any_delay_is_accepted(
    connect: Connect, moment: int
) -> None:
    producer = connect("redis://127.0.0.1:1/0", queue="q", max_delay_secs=0)

    for call in (
        lambda: producer.add_at(moment, 1),
        lambda: producer.add_in(moment, 1),
        lambda: producer.add_in_bulk(moment, [1]),
        lambda: producer.add_bulk_jobs([NewJob(1, id="i", run_at_ms=moment)]),
    ):
        with pytest.raises(ConfigError, match=f"at most {2**53}"):
            call()
