"""Users' values in MessagePack, and errors that name the place of what does not fit."""

from __future__ import annotations

import pickle
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from chasqui.errors import DecodeError, PayloadError
from chasqui.payload import PayloadCodec

codec = PayloadCodec()


def itself_in_a_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def itself_in_a_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["me"] = [value, value]
    return value


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [None, True, -1, 2**64 - 1, 1.5, "é", b"\xff", [1, [2]], {"a": {"b": [None]}}, {1: 2}]
)
def test_value_comes_back(value: Any) -> None:
    assert codec.unpack(codec.pack(value)) == value


def test_text_and_bytes_stay_apart() -> None:
    assert codec.unpack(codec.pack(["a", b"a"])) == ["a", b"a"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Decimal("1.5"), "payload is a Decimal, which MessagePack cannot hold"),
        ({"price": Decimal(1)}, "payload['price'] is a Decimal, which MessagePack cannot hold"),
        ([1, {"a": [0, Decimal(1)]}], "payload[1]['a'][1] is a Decimal, which MessagePack cannot hold"),
        ({"id": uuid.UUID(int=1)}, "payload['id'] is a UUID, which MessagePack cannot hold"),
        ({"at": datetime(2026, 1, 1, tzinfo=UTC)}, "payload['at'] is a datetime, which MessagePack cannot hold"),
        ({"on": date(2026, 1, 1)}, "payload['on'] is a date, which MessagePack cannot hold"),
        ({"tags": {"a"}}, "payload['tags'] is a set, which MessagePack cannot hold"),
        ((1, frozenset()), "payload[1] is a frozenset, which MessagePack cannot hold"),
        ([object()], "payload[0] is a object, which MessagePack cannot hold"),
        ({"n": 2**64}, "payload['n'] is a number of more than 64 bits"),
        ([-(2**63) - 1], "payload[0] is a number of more than 64 bits"),
        ({"s": "\ud800"}, "payload['s'] holds characters that UTF-8 cannot write"),
        ({"a": {Decimal(1): 2}}, "the key Decimal('1') in payload['a'] is a Decimal"),
        ({"a": {2**64: 2}}, "in payload['a'] is a number of more than 64 bits"),
        ({"a": {"\ud800": 2}}, "in payload['a'] holds characters that UTF-8 cannot write"),
        ({"first": 1, "second": {1}, "third": {2}}, "payload['second'] is a set"),
    ],
)
def test_value_that_does_not_fit_is_named_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        codec.pack(value)

    assert message in caught.value.message


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Decimal(1), "write it as text: str(value)"),
        (uuid.UUID(int=1), "write it as text: str(value)"),
        (datetime(2026, 1, 1, tzinfo=UTC), "or set datetimes=True"),
        (date(2026, 1, 1), "value.isoformat()"),
        ({1}, "make it a list"),
        (2**64, "write it as text"),
    ],
    ids=["Decimal", "UUID", "datetime", "date", "set", "big int"],
)
def test_error_says_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(PayloadError) as caught:
        codec.pack([value])

    assert advice in caught.value.message


@pytest.mark.parametrize(
    "value",
    [itself_in_a_list(), itself_in_a_dict(), nested(100_000)],
    ids=["list in itself", "dict in itself", "100,000 levels"],
)
def test_endless_nesting_is_refused_in_a_short_message(value: Any) -> None:
    with pytest.raises(PayloadError) as caught:
        codec.pack(value)

    assert "is nested deeper than MessagePack's writer goes, or contains itself" in caught.value.message
    assert len(caught.value.message) < 250


def packs(value: Any) -> bool:
    try:
        codec.pack(value)
    except PayloadError:
        return False
    return True


def test_depth_that_packs_is_not_blamed_for_something_else() -> None:
    deep = nested(600)
    if not packs(deep):
        pytest.skip("this msgpack packs fewer levels")

    with pytest.raises(PayloadError, match=r"payload\[1\] is a Decimal"):
        codec.pack([deep, Decimal(1)])


def test_value_of_500_levels_comes_back() -> None:
    assert codec.unpack(codec.pack(nested(500))) == nested(500)


MOMENTS = [
    datetime(2026, 11, 18, 8, 30, 0, 123456, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
    datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=30))),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_datetimes_come_back_as_the_same_moment_in_utc(moment: datetime) -> None:
    dated = PayloadCodec(datetimes=True)

    again = dated.unpack(dated.pack({"at": [moment]}))["at"][0]

    assert again == moment
    assert again.tzinfo is UTC


def test_naive_datetime_is_refused_by_name() -> None:
    with pytest.raises(PayloadError, match=r"payload\['at'\] is a datetime without a time zone"):
        PayloadCodec(datetimes=True).pack({"at": datetime(2026, 1, 1)})  # noqa: DTZ001


@pytest.mark.parametrize("data", [b"\xc1", bytearray(b"\xc1"), memoryview(b"\xc1")], ids=["bytes", "bytearray", "view"])
def test_raw_leaves_bytes_alone(data: Any) -> None:
    packed = PayloadCodec(raw=True).pack(data)

    assert (packed, type(packed)) == (b"\xc1", bytes)


def test_raw_hands_bytes_out_as_they_are() -> None:
    assert PayloadCodec(raw=True).unpack(b"\xc1") == b"\xc1"


@pytest.mark.parametrize("value", [None, "text", {"a": 1}, [1]])
def test_raw_refuses_what_is_not_bytes(value: Any) -> None:
    with pytest.raises(PayloadError, match="payload expects MessagePack bytes, because raw=True"):
        PayloadCodec(raw=True).pack(value)


@pytest.mark.parametrize("limited", [PayloadCodec(max_bytes=3), PayloadCodec(raw=True, max_bytes=3)], ids=["", "raw"])
def test_payload_of_just_max_bytes_is_taken_and_one_more_is_not(limited: PayloadCodec) -> None:
    assert len(limited.pack(b"a" if not limited.raw else b"aaa")) == 3

    with pytest.raises(PayloadError, match=r"has 4 bytes, more than max_payload_bytes \(3\)"):
        limited.pack(b"aa" if not limited.raw else b"aaaa")


@pytest.mark.parametrize("datetimes", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        "",
        "c1",
        "0101",
        "a1ff",
        "a5616263",
        "ddffffffff",
        "dfffffffff",
        "dbffffffff",
        "c6ffffffff",
        "c9ffffffff01",
        "819001",
        "818001",
        "d7ffffffffffffffffff",
        "c70cff" + "ff" * 12,
        "c705ff6162636465",
        "91" * 100_000,
        "8101" * 100_000,
    ],
    ids=lambda data: data[:20] if isinstance(data, str) else str(data),
)
def test_hostile_bytes_are_a_decode_error(data: str, datetimes: bool) -> None:
    with pytest.raises(DecodeError, match="the payload is not MessagePack"):
        PayloadCodec(datetimes=datetimes).unpack(bytes.fromhex(data))


def test_timestamp_beyond_all_datetimes_is_a_decode_error() -> None:
    year_100_000 = bytes.fromhex("c70cff00000000") + (3_093_527_980_800).to_bytes(8, "big")

    with pytest.raises(DecodeError):
        PayloadCodec(datetimes=True).unpack(year_100_000)


def test_codec_pickles() -> None:
    again = pickle.loads(pickle.dumps(PayloadCodec(raw=True, datetimes=True, max_bytes=9)))

    assert (again.raw, again.datetimes, again.max_bytes) == (True, True, 9)
