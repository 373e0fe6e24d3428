"""Rows -> jobs: the bytes that the engine's producer would write, and what is refused, where and in which words."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    MapType,
    NullType,
    StructType,
    VariantType,
    YearMonthIntervalType,
)

from chasqui import Backoff, ConfigError, RetryOverride
from chasqui.payload import PayloadCodec
from chasqui.protocol.blocks import BlockBuilder, Jobs
from chasqui.protocol.codec import Envelope, encode_envelope, encode_member
from chasqui_spark.ddl import columns_of
from chasqui_spark.encoding import Encoded, Encoder, complaint
from chasqui_spark.options import SinkOptions
from chasqui_spark.packing import values

NOW = 1_794_978_620_538


def encoder(ddl: str, **options: Any) -> Encoder:
    return Encoder(SinkOptions(**{"queue": "q", **options}), columns_of("test", ddl))


def encoded(ddl: str, table: dict[str, pa.Array], **options: Any) -> Encoded:
    # As on an executor: the encoder has been pickled.
    made = pickle.loads(pickle.dumps(encoder(ddl, **options)))
    return made.encode(pa.RecordBatch.from_pydict(table), NOW, 100)


def only(found: Encoded) -> Jobs:
    assert found.bad == []
    [(queue, jobs)] = found.jobs
    assert queue == "q"
    return jobs


def produced(payload: Any) -> bytes:
    """What Producer(datetimes=True) packs for that value."""
    return PayloadCodec(datetimes=True).pack(payload)


# --- Payloads ------------------------------------------------------------------------------------------------------

MOMENT = datetime(2026, 11, 18, 10, 0, 0, 123456, tzinfo=UTC)

SAMPLES: list[tuple[str, str, pa.DataType, list[Any], list[Any]]] = [
    ("boolean", "boolean", pa.bool_(), [True, False, None], [True, False, None]),
    ("tinyint", "tinyint", pa.int8(), [-128, 127, None], [-128, 127, None]),
    ("smallint", "smallint", pa.int16(), [-32768, 32767], [-32768, 32767]),
    ("int", "int", pa.int32(), [-(2**31), 2**31 - 1, 0], [-(2**31), 2**31 - 1, 0]),
    ("bigint", "bigint", pa.int64(), [-(2**63), 2**63 - 1, None], [-(2**63), 2**63 - 1, None]),
    ("float", "float", pa.float32(), [0.5, float("inf"), None], [0.5, float("inf"), None]),
    ("double", "double", pa.float64(), [0.1, -0.0, None], [0.1, -0.0, None]),
    ("string", "string", pa.string(), ["", "käse 🧀", None], ["", "käse 🧀", None]),
    ("large string", "string", pa.large_string(), ["a", None], ["a", None]),
    ("binary", "binary", pa.binary(), [b"", b"\xff\x00", None], [b"", b"\xff\x00", None]),
    ("decimal", "decimal(20,10)", pa.decimal128(20, 10), [Decimal("0"), None], ["0.0000000000", None]),
    ("big decimal", "decimal(38,0)", pa.decimal128(38, 0), [Decimal(10**37)], [str(10**37)]),
    ("date", "date", pa.date32(), [date(2026, 11, 18), None], ["2026-11-18", None]),
    ("timestamp", "timestamp", pa.timestamp("us", "UTC"), [MOMENT, None], [MOMENT, None]),
    (
        "timestamp before 1970",
        "timestamp",
        pa.timestamp("us", "Europe/Berlin"),
        [datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC)],
        [datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC)],
    ),
    (
        "timestamp_ntz",
        "timestamp_ntz",
        pa.timestamp("us"),
        [datetime(2026, 11, 18, 10), None],  # noqa: DTZ001
        ["2026-11-18T10:00:00", None],
    ),
    (
        "struct",
        "struct<a int, b struct<c string>>",
        pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))]),
        [{"a": 1, "b": {"c": "x"}}, {"a": None, "b": None}, None],
        [{"a": 1, "b": {"c": "x"}}, {"a": None, "b": None}, None],
    ),
    (
        "struct with what MessagePack lacks",
        "struct<at timestamp, price decimal(5,2)>",
        pa.struct([("at", pa.timestamp("us", "UTC")), ("price", pa.decimal128(5, 2))]),
        [{"at": MOMENT, "price": Decimal("12.50")}, None, {"at": None, "price": None}],
        [{"at": MOMENT, "price": "12.50"}, None, {"at": None, "price": None}],
    ),
    ("array", "array<int>", pa.list_(pa.int32()), [[1, None], [], None], [[1, None], [], None]),
    (
        "array of dates",
        "array<date>",
        pa.list_(pa.date32()),
        [[date(2026, 1, 2)], None, [], [None, date(2026, 1, 3)]],
        [["2026-01-02"], None, [], [None, "2026-01-03"]],
    ),
    (
        "map",
        "map<string, array<bigint>>",
        pa.map_(pa.string(), pa.list_(pa.int64())),
        [[("k", [1]), ("l", None)], [], None],
        [{"k": [1], "l": None}, {}, None],
    ),
    ("map with whole keys", "map<int, string>", pa.map_(pa.int32(), pa.string()), [[(7, "x")]], [{7: "x"}]),
]


@pytest.mark.parametrize(("ddl", "kind", "given", "meant"), [s[1:] for s in SAMPLES], ids=[s[0] for s in SAMPLES])
def test_a_column_is_packed_as_the_producer_packs_its_values(
    ddl: str, kind: pa.DataType, given: list[Any], meant: list[Any]
) -> None:
    column = pa.array(given, kind)

    in_map = only(encoded(f"a int, v {ddl}", {"a": pa.array(range(len(given)), pa.int32()), "v": column}))
    assert list(in_map.payloads) == [produced({"a": n, "v": value}) for n, value in enumerate(meant)]
    if ddl != "binary":
        alone = only(encoded(f"payload {ddl}", {"payload": column}))
        assert list(alone.payloads) == [produced(value) for value in meant]


@pytest.mark.parametrize(("ddl", "kind", "given", "meant"), [s[1:] for s in SAMPLES], ids=[s[0] for s in SAMPLES])
def test_a_slice_of_a_column_has_its_own_values_and_no_others(
    ddl: str, kind: pa.DataType, given: list[Any], meant: list[Any]
) -> None:
    column = pa.array(given * 3, kind).slice(len(given), len(given))

    assert produced(values(column)) == produced(meant)


def test_binary_payloads_are_left_alone_and_null_is_nil() -> None:
    jobs = only(encoded("payload binary", {"payload": pa.array([b"\x81\xa1n\x01", None, b"\xc1"])}))

    assert jobs.payloads == [b"\x81\xa1n\x01", b"\xc0", b"\xc1"]


@pytest.mark.parametrize("columns", [1, 7, 8, 15, 16, 300])
def test_any_number_of_columns_is_one_map_in_their_order(columns: int) -> None:
    names = [f"c{n}" for n in range(columns)]
    table = {name: pa.array([n, None], pa.int32()) for n, name in enumerate(names)}

    jobs = only(encoded(", ".join(f"{name} int" for name in names), table))

    assert list(jobs.payloads) == [
        produced({name: n for n, name in enumerate(names)}),
        produced(dict.fromkeys(names)),
    ]


def test_rows_without_payload_columns_are_empty_maps() -> None:
    assert only(encoded("name string", {"name": pa.array(["a", "b"])})).payloads == [b"\x80", b"\x80"]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("payload binary, x int, y int", "column x, y would be lost"),
        ("payload binary, name int", "column name expects string, got int"),
        ("id bigint", "column id expects string, got bigint"),
        ("delay_ms string", "column delay_ms expects bigint, got string"),
        ("run_at date", "column run_at expects timestamp"),
        ("retry string", "column retry expects struct<max_attempts"),
        ("retry struct<backoff struct<kind int>>", "column retry expects struct<max_attempts"),
        ("retry struct<max_attempts int>, max_attempts int", "exclude each other"),
        ("delay_ms int, run_at timestamp", "exclude each other"),
        ("backoff_multiplier string", "column backoff_multiplier expects double"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_a_row_is_read(ddl: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder(ddl)


@pytest.mark.parametrize("kind", [DayTimeIntervalType(), YearMonthIntervalType(), VariantType()])
def test_types_that_no_payload_holds_are_refused_where_they_stand(kind: DataType) -> None:
    schema = StructType().add("a", StructType().add("b", ArrayType(kind)))

    with pytest.raises(ConfigError, match=r"column a\.b\[\] has type .* cast it"):
        Encoder(SinkOptions(queue="q"), schema)


def test_keys_of_a_map_are_plain_values() -> None:
    schema = StructType().add("a", MapType(ArrayType(IntegerType()), IntegerType()))

    with pytest.raises(ConfigError, match="column a has keys of type array<int>"):
        Encoder(SinkOptions(queue="q"), schema)


def test_a_column_of_nothing_but_nulls_is_null() -> None:
    made = Encoder(SinkOptions(queue="q"), StructType().add("a", NullType()))
    batch = pa.RecordBatch.from_pydict({"a": pa.array([None, None], pa.null())})

    assert only(made.encode(batch, NOW, 0)).payloads == [produced({"a": None})] * 2


def test_a_queue_is_needed_from_somewhere() -> None:
    with pytest.raises(ConfigError, match="set the option queue, or have a column queue"):
        encoder("a int", queue=None)


# --- Envelopes -----------------------------------------------------------------------------------------------------


def stored(jobs: Jobs) -> list[Any]:
    """The elements of the blocks that the jobs are staged in."""
    builder = BlockBuilder()
    blocks = [*builder.add(jobs), *builder.rest()]
    assert sum(block.rows for block in blocks) == len(jobs)
    return [msgpack.unpackb(block.data, raw=True) for block in blocks]


def test_envelopes_are_those_of_the_producer() -> None:
    given = {
        "payload": pa.array([b"\x01", b"x" * 300, b"y" * 70_000]),
        "max_attempts": pa.array([None, 7, 7]),
        "backoff_kind": pa.array([None, None, "exponential"]),
        "backoff_delay_ms": pa.array([None, None, 100]),
        "backoff_multiplier": pa.array([None, None, 3.0]),
    }
    ddl = "payload binary, max_attempts int, backoff_kind string, backoff_delay_ms bigint, backoff_multiplier double"
    jobs = only(encoded(ddl, given, name="mail"))
    overrides = [None, RetryOverride(7), RetryOverride(7, Backoff.exponential(100, multiplier=3.0))]

    expected = [
        encode_envelope(Envelope(job_id, payload, NOW, 0, retry))
        for job_id, payload, retry in zip(jobs.ids, jobs.payloads, overrides, strict=True)
    ]

    assert stored(jobs) == [[b"same", b"mail", *expected]]
    assert jobs.envelopes() == expected


def test_ids_are_ulids_and_differ() -> None:
    jobs = only(encoded("a int", {"a": pa.array(range(1000), pa.int32())}))

    assert {len(job_id) for job_id in jobs.ids} == {26}
    assert len(set(jobs.ids)) == 1000


def test_a_name_column_wins_over_the_option_and_null_means_the_option() -> None:
    jobs = only(encoded("name string, a int", {"name": pa.array(["x", None, ""]), "a": pa.array([1, 2, 3])}, name="o"))

    assert jobs.names == [b"x", b"o", b""]
    [block] = stored(jobs)
    assert block[0] == b"named"
    assert block[1::2] == [b"x", b"o", b""]


def test_delays_are_counted_from_now_and_the_past_means_now() -> None:
    jobs = only(encoded("delay_ms bigint", {"delay_ms": pa.array([5, 0, None])}, delay_ms=7))
    assert jobs.run_at_ms == [NOW + 5, None, NOW + 7]

    times = [datetime(2030, 1, 1, tzinfo=UTC), datetime(1999, 1, 1, tzinfo=UTC), None]
    table = {"run_at": pa.array(times, pa.timestamp("us", "UTC"))}
    jobs = only(encoded("run_at timestamp", table, max_delay_secs=0))
    assert jobs.run_at_ms == [int(times[0].timestamp() * 1000), None, None]  # type: ignore[union-attr]

    jobs = only(encoded("run_at bigint", {"run_at": pa.array([NOW + 9, NOW - 1])}))
    assert jobs.run_at_ms == [NOW + 9, None]


def test_delayed_jobs_are_staged_as_members_with_their_time() -> None:
    jobs = only(encoded("delay_ms bigint, a int", {"delay_ms": pa.array([5, 0]), "a": pa.array([1, 2])}, name="n"))

    now, later = stored(jobs)

    assert now[0] == b"same"
    assert later[:2] == [b"later", b"%d" % (NOW + 5)]
    assert later[2] == encode_member(b"n", encode_envelope(Envelope(jobs.ids[0], jobs.payloads[0], NOW, 0)))


def test_given_ids_are_remembered_for_the_dedup_ttl_and_made_ones_not() -> None:
    jobs = only(encoded("id string, delay_ms int", {"id": pa.array(["a", None]), "delay_ms": pa.array([0, 0])}))

    assert jobs.ids[0] == "a"
    assert len(jobs.ids[1]) == 26
    assert jobs.marker_ttls_s == [86_400, 0]
    [block] = stored(jobs)
    assert block[0] == b"unique"
    assert block[1:4] == [b"a", b"", b"86400"]


def test_retry_as_a_struct_as_the_source_gives_it() -> None:
    backoff = pa.struct(
        [
            ("kind", pa.string()),
            ("delay_ms", pa.int64()),
            ("max_delay_ms", pa.int64()),
            ("multiplier", pa.float64()),
            ("jitter_ms", pa.int64()),
        ]
    )
    kind = pa.struct([("max_attempts", pa.int64()), ("backoff", backoff)])
    cells = [
        {"max_attempts": 3, "backoff": {"kind": "fixed", "delay_ms": 5}},
        {"max_attempts": None, "backoff": None},
        None,
    ]
    ddl = (
        "retry struct<max_attempts bigint, backoff struct<kind string, delay_ms bigint, max_delay_ms bigint, "
        "multiplier double, jitter_ms bigint>>"
    )

    jobs = only(encoded(ddl, {"retry": pa.array(cells, kind)}, max_attempts=9))

    assert jobs.retries is not None
    assert [msgpack.unpackb(retry) for retry in jobs.retries] == [
        [3, ["fixed", 5, None, None, None]],
        [None, None],
        [9, None],
    ]


def test_rows_go_to_the_queues_they_name_in_order_unless_the_option_does() -> None:
    table = {"queue": pa.array(["a", "b", "a"]), "n": pa.array([1, 2, 3])}

    routed = encoded("queue string, n int", table, queue=None)
    assert {queue: [msgpack.unpackb(p)["n"] for p in jobs.payloads] for queue, jobs in routed.jobs} == {
        "a": [1, 3],
        "b": [2],
    }

    assert [msgpack.unpackb(p)["n"] for p in only(encoded("queue string, n int", table)).payloads] == [1, 2, 3]


# --- Bad rows ------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("name string", {"name": ["ok", "ä" * 200]}, {}, "name", "at most 256 bytes"),
    ("id string", {"id": ["ok", " "]}, {}, "id", "not blank"),
    ("delay_ms bigint", {"delay_ms": [1, -1]}, {}, "delay_ms", "zero or more, got -1"),
    ("delay_ms bigint", {"delay_ms": [1, 10**12]}, {}, "delay_ms", "longer than maxDelaySecs"),
    ("run_at bigint", {"run_at": [1, 2 * NOW]}, {}, "run_at", "longer than maxDelaySecs"),
    ("max_attempts bigint", {"max_attempts": [1, -1]}, {}, "max_attempts", "whole number from 0"),
    (
        "backoff_kind string, backoff_delay_ms int",
        {"backoff_kind": ["fixed", "linear"], "backoff_delay_ms": [1, 1]},
        {},
        "backoff_kind, backoff_delay_ms",
        "fixed or exponential, got 'linear'",
    ),
    (
        "backoff_kind string, backoff_delay_ms int",
        {"backoff_kind": ["fixed", None], "backoff_delay_ms": [1, 1]},
        {},
        "backoff_kind, backoff_delay_ms",
        "needs its kind",
    ),
    ("a string", {"a": ["x", "y" * 200]}, {"max_payload_bytes": 150}, "a", "more than maxPayloadBytes"),
    ("queue string", {"queue": ["q", "{x}"]}, {"queue": None}, "queue", "expects the name of a queue, got '{x}'"),
    ("queue string", {"queue": ["q", None]}, {"queue": None}, "queue", "got None"),
]


@pytest.mark.parametrize(("ddl", "table", "options", "column", "why"), BAD)
def test_a_bad_row_is_named_and_the_others_stay_good(
    ddl: str, table: dict[str, Any], options: dict[str, Any], column: str, why: str
) -> None:
    found = encoded(ddl, {name: pa.array(cells) for name, cells in table.items()}, **options)

    [(bad, _, _)] = found.bad
    assert (bad.row, bad.column) == (101, column)
    assert why in bad.why
    assert len(only(Encoded(found.jobs, []))) == 1
    text = str(complaint([bad], 3))
    assert f"partition 3, row 101, column {column}" in text
    assert "badRows" in text


def test_a_value_that_cannot_be_converted_is_a_bad_row() -> None:
    """Spark's dates and its text may be what Python's cannot."""
    days = pa.array([0, 10**8], pa.int32()).view(pa.date32())
    [(bad, _, letter)] = encoded("d date, n int", {"d": days, "n": pa.array([1, 2])}).bad
    assert (bad.row, bad.column) == (101, "d")
    assert msgpack.unpackb(msgpack.unpackb(letter.envelope)[1]) == {"d": None, "n": 2}

    latin = pa.array([b"ok", b"k\xe4se"]).view(pa.string())
    [(bad, _, _)] = encoded("s string", {"s": latin}).bad
    assert (bad.row, bad.column) == (101, "s")


def test_the_dead_letter_of_a_bad_row_holds_its_job_and_says_why() -> None:
    found = encoded("name string, n int", {"name": pa.array(["x" * 300]), "n": pa.array([1])})

    [(_, queue, letter)] = found.bad

    assert queue == "q"
    assert letter.name == b"x" * 256
    assert letter.reason == "malformed"
    assert letter.detail.startswith("name: ")
    assert msgpack.unpackb(msgpack.unpackb(letter.envelope)[1]) == {"n": 1}


def test_large_batches_are_converted_in_pieces() -> None:
    made = encoder("a string")
    small = pa.RecordBatch.from_pydict({"a": pa.array(["x"] * 2500)})
    large = pa.RecordBatch.from_pydict({"a": pa.array(["x" * 1_000_000] * 20)})

    assert [piece.num_rows for piece in made.slices(small)] == [1000, 1000, 500]
    assert max(piece.num_rows for piece in made.slices(large)) <= 5
    assert list(made.slices(small.slice(0, 0))) == []
