"""Rows of outcomes and of dead letters: what each says, and which say nothing that can be done."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    DataType,
    DoubleType,
    IntegerType,
    NullType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from chasqui import ChasquiError
from chasqui_spark import replay, settle
from chasqui_spark.options import ReplayOptions, SettleOptions

A, B = "1795000000000-0", "1795000000000-1"
AT = datetime(2026, 11, 18, 10, tzinfo=UTC)


def table(*rows: dict[str, Any], **kinds: pa.DataType) -> pa.RecordBatch:
    made = pa.RecordBatch.from_pylist([{"entry_id": A, "outcome": "ok"} | row for row in rows])
    for name, kind in kinds.items():
        place = made.schema.get_field_index(name)
        made = made.set_column(place, name, made.column(name).cast(kind))
    return made


def outcomes(*rows: dict[str, Any], **options: Any) -> list[Any]:
    found = settle.by_queue(table(*rows), SettleOptions(queue="q", **options))
    assert list(found) == ["q"]
    return found["q"]


def test_of_several_outcomes_of_one_job_the_first_counts() -> None:
    rows = [{"outcome": "retry"}, {"entry_id": B, "outcome": "ok"}, {"outcome": "ok"}, {"outcome": "fail"}]

    assert [(one.entry_id.decode(), one.outcome) for one in outcomes(*rows)] == [(A, "retry"), (B, "ok")]


def test_an_error_is_cut_as_those_of_handlers_are() -> None:
    (long,) = outcomes({"outcome": "fail", "error": "é" * 1_000_000})

    assert long.error == "é" * 1024


def test_results_are_encoded_as_payloads_are_and_only_where_they_are_stored() -> None:
    row = {"result": {"price": Decimal("12.50"), "at": AT}}

    (stored,) = outcomes(row, store_results=True)
    (left,) = outcomes(row)

    assert msgpack.unpackb(stored.result, timestamp=3) == {"price": "12.50", "at": AT}
    assert left.result is None
    assert outcomes({"result": b"\x07"}, store_results=True)[0].result == b"\x07"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"outcome": None}, f"column outcome of entry {A} expects one of ok, retry, fail; got None"),
        ({"outcome": "done"}, "got 'done'"),
        ({"entry_id": None}, "column entry_id expects an id as it was read, .* got None"),
        *(
            ({"entry_id": entry}, "column entry_id expects an id as it was read")
            for entry in ("1795000000000", "5-", "-5", "0" + A, A + "0" * 20, "99999999999999999999-0", "١٢-٣", "a-b")
        ),
    ],
)
def test_a_row_that_says_nothing_that_can_be_done_is_named(row: dict[str, Any], message: str) -> None:
    for other in ({}, row):
        with pytest.raises(ChasquiError, match=message):
            outcomes(other, row)


def test_a_row_without_a_queue_is_named() -> None:
    rows = table({"queue": "q"}, {"queue": None, "entry_id": B})

    with pytest.raises(ChasquiError, match=f"column queue is null for entry {B}"):
        settle.by_queue(rows, SettleOptions())
    with pytest.raises(ChasquiError, match="queue expects a name"):
        settle.by_queue(table({"queue": "a{b"}), SettleOptions())


def schema(**more: DataType) -> StructType:
    kinds = {"entry_id": StringType(), "outcome": StringType()} | more
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def test_columns_that_are_always_null_say_nothing() -> None:
    settle.check_columns(SettleOptions(queue="q"), schema(error=NullType(), delay_ms=NullType(), result=NullType()))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (schema(error=IntegerType()), "column error expects string, got int"),
        (schema(delay_ms=DoubleType()), "column delay_ms expects a whole number, got double"),
        (schema(outcome=NullType()), "column outcome expects string, got void"),
        (schema(error=StringType()).add("error", StringType()), "column error stands twice"),
        (schema(result=VariantType()), "column result has type variant"),
    ],
)
def test_columns_of_outcomes_that_cannot_be_meant_are_refused(columns: StructType, message: str) -> None:
    with pytest.raises(ChasquiError, match=message):
        settle.check_columns(SettleOptions(queue="q", store_results=True), columns)


def test_a_queue_that_cannot_be_is_refused_before_a_row_is_read() -> None:
    with pytest.raises(ChasquiError, match="queue expects a name"):
        settle.check_columns(SettleOptions(queue="a{b"), schema())
    with pytest.raises(ChasquiError, match="queue expects a name"):
        replay.check_columns(ReplayOptions(queue="a{b"), schema())


def test_repaired_payloads_are_encoded_as_those_of_the_sink() -> None:
    rows = table(
        {"payload": {"at": AT, "price": Decimal("12.50")}, "name": None},
        {"payload": None, "entry_id": B, "name": "new"},
    )

    (first, second) = replay.by_queue(rows, ReplayOptions(queue="q"))["q"]

    assert first.payload is not None
    assert msgpack.unpackb(first.payload, timestamp=3) == {"at": AT, "price": "12.50"}
    assert (second.entry_id, second.payload, second.name) == (B, None, "new")


def test_a_dead_letter_that_cannot_go_back_so_is_named() -> None:
    options = ReplayOptions(queue="q")

    with pytest.raises(ChasquiError, match=f"column name of entry {A}: name takes at most 256 bytes"):
        replay.by_queue(table({"name": "x" * 257}), options)
    with pytest.raises(ChasquiError, match=f"column payload of entry {A}: "):
        replay.by_queue(table({"payload": 2**62}, payload=pa.timestamp("us")), options)  # no calendar has it
    with pytest.raises(ChasquiError, match="column name stands twice"):
        replay.check_columns(options, schema(name=StringType()).add("name", StringType()))
    with pytest.raises(ChasquiError, match="column payload has type variant"):
        replay.check_columns(options, StructType().add("entry_id", StringType()).add("payload", VariantType()))
