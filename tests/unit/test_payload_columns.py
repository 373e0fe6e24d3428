"""MessagePack payloads into Arrow: what fits which type, and why the rest does not."""

from __future__ import annotations

import time
import tracemalloc
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa
import pytest

from chasqui_spark.ddl import columns_of
from chasqui_spark.payloads import PayloadColumn

NOON = datetime(2026, 11, 18, 12, 0, 0, 500_000, tzinfo=UTC)


def read(ddl: str, *payloads: Any) -> tuple[list[Any], dict[int, str]]:
    column = PayloadColumn(columns_of("payloadSchema", ddl))
    packed = [p if isinstance(p, bytes) else msgpack.packb(p, datetime=True) for p in payloads]
    array, bad = column.array(packed)
    return array.to_pylist(), bad


FITS = [
    ("boolean", True, True),
    ("tinyint", -128, -128),
    ("smallint", 32767, 32767),
    ("int", -(2**31), -(2**31)),
    ("bigint", 2**63 - 1, 2**63 - 1),
    ("float", 0.5, 0.5),
    ("float", 2**24 + 1, 2.0**24),
    ("float", float("-inf"), float("-inf")),
    ("double", 1.5, 1.5),
    ("double", 3, 3.0),
    ("double", 2**60 + 1, float(2**60 + 1)),
    ("string", "ñ", "ñ"),
    ("binary", b"\xff", b"\xff"),
    ("decimal(5,2)", "123.45", Decimal("123.45")),
    ("decimal(5,2)", 123, Decimal("123.00")),
    ("decimal(5,2)", 1.5, Decimal("1.50")),
    ("decimal(38,0)", "9" * 38, Decimal("9" * 38)),
    ("date", "2026-11-18", date(2026, 11, 18)),
    ("timestamp", NOON, NOON),
    ("timestamp", "2026-11-18T13:00:00.5+01:00", NOON),
    ("timestamp", "2026-11-18T12:00:00.5", NOON),
    ("timestamp", int(NOON.timestamp() * 1000), NOON),
    ("timestamp_ntz", "2026-11-18T12:00:00.5", NOON.replace(tzinfo=None)),
    ("array<int>", [1, None, 3], [1, None, 3]),
    ("map<string, double>", {"a": 1, "b": 2.5}, [("a", 1.0), ("b", 2.5)]),
    ("map<int, string>", {1: "x"}, [(1, "x")]),
    ("struct<a int, b array<struct<c string>>>", {"a": 1, "b": [{"c": "x"}]}, {"a": 1, "b": [{"c": "x"}]}),
    ("int", None, None),
    ("struct<a int>", None, None),
    ("struct<a int>", {}, {"a": None}),
]


@pytest.mark.parametrize(("kind", "value", "expected"), FITS, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("company", [(), ({"v": [[]] * 3, "x": 1},)], ids=["alone", "beside a bad one"])
def test_a_value_that_fits_is_read_alike_alone_or_beside_a_bad_one(
    kind: str, value: Any, expected: Any, company: tuple[Any, ...]
) -> None:
    """Alone it goes column by column; a bad row makes the page go value by value."""
    rows, bad = read(f"v {kind}", {"v": value, "other": 1}, *company, *(["no map"] if company else []))

    assert rows[0] == {"v": expected}
    assert 0 not in bad


MISFITS = [
    ("boolean", 1, "payload.v is a whole number, BOOLEAN does not hold it"),
    ("tinyint", 128, "payload.v is a number that TINYINT does not hold"),
    ("int", True, "payload.v is a boolean, INT does not hold it"),
    ("int", 1.0, "payload.v is a float, INT does not hold it"),
    ("int", "1", "payload.v is text, INT does not hold it"),
    ("bigint", 2**63, "payload.v is a number that BIGINT does not hold"),
    ("float", 1e300, "payload.v is a number that FLOAT does not hold"),
    ("float", -3.5e38, "payload.v is a number that FLOAT does not hold"),
    ("double", "x", "payload.v is text, DOUBLE does not hold it"),
    ("decimal(5,2)", float("nan"), "payload.v is no number that DECIMAL(5,2) holds"),
    ("string", 1, "payload.v is a whole number, STRING does not hold it"),
    ("string", b"x", "payload.v is binary, STRING does not hold it"),
    ("binary", "x", "payload.v is text, BINARY does not hold it"),
    ("decimal(5,2)", "1.234", "payload.v is a number that DECIMAL(5,2) does not hold"),
    ("decimal(5,2)", "1234.00", "payload.v is a number that DECIMAL(5,2) does not hold"),
    ("decimal(5,2)", "1e999999", "payload.v is no number that DECIMAL(5,2) holds"),
    ("decimal(5,2)", "NaN", "payload.v is no number that DECIMAL(5,2) holds"),
    ("decimal(5,2)", "x", "payload.v is no number that DECIMAL(5,2) holds"),
    ("date", "18.11.2026", "payload.v is no date; DATE expects YYYY-MM-DD"),
    ("timestamp", "noon", "payload.v is no time; TIMESTAMP expects ISO text such as 2026-11-18T10:00:00Z"),
    ("timestamp", 2**63 - 1, "payload.v is a time that TIMESTAMP does not hold: years are 1 to 9999"),
    ("timestamp", 253402300800000, "payload.v is a time that TIMESTAMP does not hold: years are 1 to 9999"),
    ("timestamp", "0001-01-01T00:00:00+01:00", "payload.v is a time that TIMESTAMP does not hold: years are 1 to 9999"),
    ("array<int>", [1, "x"], "payload.v[1] is text, INT does not hold it"),
    ("array<int>", {}, "payload.v is a map, ARRAY does not hold it"),
    ("map<string, int>", {"a": "x"}, "payload.v['a'] is text, INT does not hold it"),
    ("map<string, int>", {None: 1}, "payload.v has a key that is nil"),
    ("struct<a struct<b int>>", {"a": {"b": []}}, "payload.v.a.b is an array, INT does not hold it"),
    ("int not null", None, "payload.v is missing, and declared NOT NULL"),
    ("string", msgpack.ExtType(5, b"x"), "payload.v is an extension, STRING does not hold it"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), MISFITS, ids=lambda x: str(x)[:30])
def test_a_value_that_does_not_fit_makes_its_row_null_and_says_why(kind: str, value: Any, reason: str) -> None:
    rows, bad = read(f"v {kind}, w int", {"v": value, "w": 1})

    assert rows == [None]
    assert bad == {0: reason}


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "payload is not MessagePack"),
        (b"\xc1", "payload is not MessagePack"),
        (b"\x81\xa1v", "payload is not MessagePack"),
        (b"\x81\xa1v\xa2\xff\xff", "payload is not MessagePack"),
        (b"\xdf\xff\xff\xff\xff", "payload is not MessagePack"),
        (b"\x91" * 100_000, "payload is not MessagePack"),
        ([1], "payload is an array, a map does not hold it"),
        (msgpack.packb(None), "payload is nil, payloadSchema expects a map"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_bytes_that_are_no_map_are_bad_rows(payload: Any, reason: str) -> None:
    rows, bad = read("v int", {"v": 1}, payload, {"v": 2})

    assert rows == [{"v": 1}, None, {"v": 2}]
    assert bad[1].startswith(reason)


def test_a_page_of_plain_values_becomes_arrays_of_the_declared_types() -> None:
    column = PayloadColumn(columns_of("payloadSchema", "n int, t string"))

    array, bad = column.array([msgpack.packb({"n": i, "t": str(i)}) for i in range(3)])

    assert bad == {}
    assert array.type == pa.struct([("n", pa.int32()), ("t", pa.string())])
    assert array.field("n").to_pylist() == [0, 1, 2]


def test_large_payloads_are_decoded_some_at_a_time() -> None:
    """Half a megabyte of empty maps is fifty in memory."""
    bomb = b"\x82\xa1n\x01\xa1x\xdd" + (1 << 19).to_bytes(4, "big") + b"\x80" * (1 << 19)
    column = PayloadColumn(columns_of("payloadSchema", "n int"))
    bomb_in_row_5 = [bomb] * 5 + [b"\xc1"] + [bomb] * 5

    tracemalloc.start()
    array, bad = column.array(bomb_in_row_5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert array.to_pylist() == [{"n": 1}] * 5 + [None] + [{"n": 1}] * 5
    assert list(bad) == [5]
    assert peak < 160 << 20


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x91" * (1 << 20), id="deep"),
        pytest.param(b"\xdd\x00\x0f\xff\xff" * 510 + b"\xc0" * (1 << 20), id="long arrays inside each other"),
        pytest.param(b"\xdd\xff\xff\xff\xff" + b"\x01" * 10, id="four billion elements"),
        pytest.param(b"\xdf\xff\xff\xff\xff" + b"\x01" * 10, id="four billion keys"),
        pytest.param(b"\xdb\xff\xff\xff\xff" + b"x" * 10, id="four gigabytes of text"),
        pytest.param(b"\xc9\xff\xff\xff\xff\x05" + b"x" * 10, id="four gigabytes of an extension"),
        pytest.param(b"\x81\xa1n\xd5\xff\x00\x00", id="a timestamp of two bytes"),
        pytest.param(b"\x81\x91\x01\x01", id="an array as a key"),
    ],
)
def test_hostile_bytes_are_a_bad_row_in_bounded_time(payload: bytes) -> None:
    begin = time.monotonic()

    rows, bad = read("n int", payload, {"n": 2})

    assert rows == [None, {"n": 2}]
    assert bad[0].startswith("payload is not MessagePack")
    assert time.monotonic() - begin < 10


def test_a_payload_that_is_not_there_is_null_without_a_reason() -> None:
    array, bad = PayloadColumn(columns_of("payloadSchema", "n int")).array([None])

    assert (array.to_pylist(), bad) == ([None], {})
