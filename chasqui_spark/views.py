"""What can be read, and the columns of each view. All columns may be null; timestamps are real ones, in UTC."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from chasqui import OptionError
from chasqui_spark.ddl import columns_of
from chasqui_spark.options import SourceOptions

RETRY = (
    "struct<max_attempts bigint, backoff struct<kind string, delay_ms bigint, max_delay_ms bigint, "
    "multiplier double, jitter_ms bigint>>"
)

# In every view of a stream `entry_id` is the entry's id there, and `enqueued_at` the time in it: the server's clock.
# `created_at` is the clock of whoever made the job or the event. `error` says why an entry could not be read.
_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "jobs": "queue string, entry_id string, id string, name string, payload {payload}, created_at timestamp, "
        f"enqueued_at timestamp, attempt bigint, retry {RETRY}, error string",
        "events": "queue string, entry_id string, event string, id string, name string, created_at timestamp, "
        "enqueued_at timestamp, attempt bigint, duration_us bigint, backoff_ms bigint, delay_ms bigint, reason string, "
        "fields map<string, string>",
        "dlq": "queue string, entry_id string, id string, name string, payload {payload}, created_at timestamp, "
        f"enqueued_at timestamp, attempt bigint, retry {RETRY}, source_id string, reason string, detail string, "
        "failure string, error string",
        "pending": "queue string, entry_id string, enqueued_at timestamp, consumer string, idle_ms bigint, "
        "deliveries bigint",
        "delayed": "queue string, id string, name string, payload {payload}, created_at timestamp, run_at timestamp, "
        f"attempt bigint, retry {RETRY}, error string",
        "repeatable": "queue string, key string, name string, every_ms bigint, cron string, tz string, "
        "next_fire_at timestamp, fire_limit bigint, start_after timestamp, end_before timestamp, missed_fires string, "
        f"max_catchup bigint, retry {RETRY}",
        "results": "queue string, id string, result {payload}, expires_at timestamp, error string",
        "stats": "queue string, waiting bigint, pending bigint, delayed bigint, dlq bigint, oldest_age_ms bigint, "
        "paused boolean",
    }
)
_PAYLOAD_COLUMN: Mapping[str, str] = MappingProxyType({"results": "result"})

_ARROW: Mapping[type[DataType], pa.DataType] = MappingProxyType(
    {
        BooleanType: pa.bool_(),
        ByteType: pa.int8(),
        ShortType: pa.int16(),
        IntegerType: pa.int32(),
        LongType: pa.int64(),
        FloatType: pa.float32(),
        DoubleType: pa.float64(),
        StringType: pa.string(),
        BinaryType: pa.binary(),
        DateType: pa.date32(),
        TimestampType: pa.timestamp("us", tz="UTC"),
        TimestampNTZType: pa.timestamp("us"),
    }
)


def payload_columns(options: SourceOptions) -> StructType | None:
    """What ``payloadSchema`` declares, NOT NULL and all; None where payloads stay binary."""
    return None if options.payload_schema is None else columns_of("payloadSchema", options.payload_schema)


def schema_of(options: SourceOptions) -> StructType:
    """The columns of the view that was asked for."""
    columns = columns_of("view", _COLUMNS[options.view].format(payload="binary"))
    declared = payload_columns(options)
    if declared is None:
        return columns
    name = _PAYLOAD_COLUMN.get(options.view, "payload")
    if name not in columns.names:
        raise OptionError(f"payloadSchema goes with views that have payloads; {options.view} has none")
    nullable = _nullable(declared)
    return StructType([StructField(f.name, nullable if f.name == name else f.dataType) for f in columns])


def check_schema(options: SourceOptions, given: StructType) -> None:
    """Refuse columns of the user's own (``.schema(...)``): the view has its columns."""
    wanted = schema_of(options)
    if [(f.name, _nullable(f.dataType)) for f in given] != [(f.name, f.dataType) for f in wanted]:
        raise OptionError(
            f"view {options.view} has its own columns, leave .schema() out (payloadSchema declares the payload's); "
            f"expected {wanted.simpleString()}, got {given.simpleString()}"
        )


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type that Spark expects for that type."""
    if isinstance(kind, StructType):
        return pa.struct([pa.field(f.name, arrow_type(f.dataType)) for f in kind])
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", arrow_type(kind.elementType)))
    if isinstance(kind, MapType):
        return pa.map_(arrow_type(kind.keyType), pa.field("value", arrow_type(kind.valueType)))
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    return _ARROW[type(kind)]


def arrow_schema(columns: StructType) -> pa.Schema:
    return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in columns])


def _nullable(kind: DataType) -> DataType:
    """The same type with NOT NULL left out: a payload that does not fit is null as a whole."""
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, _nullable(f.dataType)) for f in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType))
    return kind
