"""Payloads into Arrow: MessagePack decoded straight into arrays of the declared types.

A value fits its type or the row is bad; nothing is guessed. Missing keys are null, unknown ones are ignored.

    BOOLEAN                      bool
    TINYINT ... BIGINT           int within the type's range
    FLOAT, DOUBLE                float, int, rounded; not beyond the largest one
    DECIMAL(p,s)                 text, int, float: exactly representable with that scale
    STRING / BINARY              str / bin
    DATE                         text YYYY-MM-DD
    TIMESTAMP, TIMESTAMP_NTZ     a MessagePack timestamp, ISO text (UTC unless it says otherwise), int (epoch ms);
                                 years 1 to 9999, as Spark has them
    ARRAY, MAP, STRUCT           array, map, map

A page whose values all have plain types goes column by column; one that holds anything else goes value by value. The
rules are the same, so which way a page took cannot be seen in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal, DecimalException
from typing import Any, TypeAlias

import msgpack
import pyarrow as pa
import pyarrow.compute as pc
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
    StructType,
    TimestampNTZType,
    TimestampType,
)

from chasqui_spark.views import arrow_type

Convert: TypeAlias = Callable[[Any], Any]

_unpack = msgpack.unpackb
_NONE = type(None)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_ZERO = date(1970, 1, 1).toordinal()
_LONGEST_TEXT = 64
_AT_ONCE = 1 << 20
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_FLOAT_TOP = 2.0**128 - 2.0**103  # what is less rounds to a number of 32 bits
_EXACT = Context(prec=100)

# Types of which Arrow takes Python values as they are, and what these may be.
_PLAIN: dict[type[DataType], frozenset[type]] = {
    BooleanType: frozenset({bool}),
    ByteType: frozenset({int}),
    ShortType: frozenset({int}),
    IntegerType: frozenset({int}),
    LongType: frozenset({int}),
    FloatType: frozenset({float, int}),
    DoubleType: frozenset({float, int}),
    StringType: frozenset({str}),
    BinaryType: frozenset({bytes}),
}
_BITS: dict[type[DataType], int] = {ByteType: 7, ShortType: 15, IntegerType: 31, LongType: 63}


class Misfit(ValueError):
    """A value that its declared type does not hold; ``path`` grows on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path = ""

    def at(self, step: str) -> Misfit:
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"payload{self.path} {self.args[0]}"


class PayloadColumn:
    """Turns payloads into a struct array. ``declared`` is what the user wrote, NOT NULL included."""

    def __init__(self, declared: StructType) -> None:
        self._declared = declared
        self._type = arrow_type(declared)
        self._convert = _converter(declared)

    def array(self, payloads: Sequence[bytes | None]) -> tuple[pa.Array, dict[int, str]]:
        """The column, and why rows of it are null; a payload that is None is null without a reason."""
        # A byte of MessagePack may be a hundred as a value, so that not too many are decoded at once.
        if len(payloads) > 1 and sum(len(payload) for payload in payloads if payload) > _AT_ONCE:
            half = len(payloads) // 2
            first, bad = self.array(payloads[:half])
            second, more = self.array(payloads[half:])
            return pa.concat_arrays([first, second]), bad | {half + i: reason for i, reason in more.items()}
        try:
            values = [_unpack(payload, strict_map_key=False) for payload in payloads]
            quick = _quick(self._declared, values)
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.exceptions.UnpackException):
            quick = None
        return (quick, {}) if quick is not None else self._careful(payloads)

    def _careful(self, payloads: Sequence[bytes | None]) -> tuple[pa.Array, dict[int, str]]:
        rows: list[Any] = []
        bad: dict[int, str] = {}
        for i, payload in enumerate(payloads):
            row = None
            if payload is not None:
                try:
                    row = self._convert(_decoded(payload))
                    if row is None:
                        raise Misfit("is nil, payloadSchema expects a map")
                except Misfit as misfit:
                    bad[i] = str(misfit)
            rows.append(row)
        return pa.array(rows, self._type), bad


def _decoded(payload: bytes) -> Any:
    try:
        return _unpack(payload, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise Misfit(f"is not MessagePack: {type(error).__name__} {error}"[:200]) from None
    except msgpack.exceptions.UnpackException as error:
        raise Misfit(f"is not MessagePack: {type(error).__name__}") from None


# --- Column by column ---


def _quick(declared: StructType, rows: list[Any]) -> pa.Array | None:
    """The struct array, or None where a row needs the careful way."""
    if set(map(type, rows)) != {dict}:
        return None
    arrays = []
    for field in declared:
        name = field.name
        column = [row.get(name) for row in rows]
        array = _quick_column(field.dataType, field.nullable, column)
        if array is None:
            return None
        arrays.append(array)
    return pa.StructArray.from_arrays(arrays, fields=list(arrow_type(declared)))


def _quick_column(kind: DataType, nullable: bool, column: list[Any]) -> pa.Array | None:
    types = set(map(type, column))
    if not nullable and _NONE in types:
        return None
    if isinstance(kind, StructType):
        return _quick(kind, column)
    plain = _PLAIN.get(type(kind))
    try:
        if plain is not None:
            if not types - plain <= {_NONE}:
                return None
            array = pa.array(column, arrow_type(kind))
            # What is too large for 32 bits has become infinite; what was infinite before may be.
            return None if isinstance(kind, FloatType) and pc.any(pc.is_inf(array)).as_py() else array
        return pa.array(list(map(_converter(kind), column)), arrow_type(kind))
    except (Misfit, pa.ArrowInvalid, OverflowError):
        return None


# --- Value by value ---


def _converter(kind: DataType) -> Convert:
    """A function that gives what Arrow takes for that type, None for None, or raises Misfit."""
    if isinstance(kind, StructType):
        return _struct(kind)
    if isinstance(kind, ArrayType):
        return _array(_converter(kind.elementType))
    if isinstance(kind, MapType):
        return _map(_converter(kind.keyType), _converter(kind.valueType))
    if isinstance(kind, DecimalType):
        return _decimal(kind)
    if isinstance(kind, DateType):
        return _date
    if isinstance(kind, TimestampType | TimestampNTZType):
        return _timestamp
    if type(kind) in _BITS:
        return _integer(kind.simpleString().upper(), _BITS[type(kind)])
    return _as_is(kind)


def _as_is(kind: DataType) -> Convert:
    allowed = _PLAIN[type(kind)]
    wanted = kind.simpleString().upper()
    floating, short = isinstance(kind, FloatType | DoubleType), isinstance(kind, FloatType)

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if type(value) not in allowed:
            raise _unfit(wanted, value)
        if short and _FLOAT_TOP <= abs(value) < math.inf:
            raise Misfit("is a number that FLOAT does not hold")
        return float(value) if floating else value

    return convert


def _integer(wanted: str, bits: int) -> Convert:
    top = 2**bits

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not int:
            raise _unfit(wanted, value)
        if not -top <= value < top:
            raise Misfit(f"is a number that {wanted} does not hold")
        return value

    return convert


def _decimal(kind: DecimalType) -> Convert:
    wanted, unit = kind.simpleString().upper(), Decimal(1).scaleb(-kind.scale)

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if type(value) not in (str, int, float) or len(str(value)) > _LONGEST_TEXT:
            raise _unfit(wanted, value)
        try:
            exact = Decimal(str(value))
            if not exact.is_finite():
                raise ValueError
            fitted = exact.quantize(unit, context=_EXACT)
            if fitted != exact or len(fitted.as_tuple().digits) > kind.precision:
                raise Misfit(f"is a number that {wanted} does not hold")
        except (DecimalException, ValueError) as error:
            raise error if isinstance(error, Misfit) else Misfit(f"is no number that {wanted} holds") from None
        return fitted

    return convert


def _date(value: Any) -> Any:
    if value is None:
        return None
    if type(value) is not str or len(value) > _LONGEST_TEXT:
        raise _unfit("DATE", value)
    try:
        return date.fromisoformat(value).toordinal() - _DAY_ZERO
    except ValueError:
        raise Misfit("is no date; DATE expects YYYY-MM-DD") from None


def _timestamp(value: Any) -> Any:
    """Microseconds since 1970."""
    if value is None:
        return None
    if type(value) is int:
        return _within(value * 1000)
    if isinstance(value, msgpack.Timestamp):
        return _within(value.seconds * 1_000_000 + value.nanoseconds // 1000)
    if type(value) is not str or len(value) > _LONGEST_TEXT:
        raise _unfit("TIMESTAMP", value)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise Misfit("is no time; TIMESTAMP expects ISO text such as 2026-11-18T10:00:00Z") from None
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = aware - _EPOCH
    return _within((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


def _within(us: int) -> int:
    if not _FIRST_US <= us <= _LAST_US:
        raise Misfit("is a time that TIMESTAMP does not hold: years are 1 to 9999")
    return us


def _array(element: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not list:
            raise _unfit("ARRAY", value)
        found = []
        for i, item in enumerate(value):
            try:
                found.append(element(item))
            except Misfit as misfit:
                raise misfit.at(f"[{i}]") from None
        return found

    return convert


def _map(key: Convert, item: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not dict:
            raise _unfit("MAP", value)
        found = []
        for name, inner in value.items():
            if name is None:
                raise Misfit("has a key that is nil")
            try:
                found.append((key(name), item(inner)))
            except Misfit as misfit:
                raise misfit.at(f"[{name!r:.40}]") from None
        return found

    return convert


def _struct(kind: StructType) -> Convert:
    fields = [(field.name, field.nullable, _converter(field.dataType)) for field in kind]

    def convert(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not dict:
            raise _unfit("a map", value)
        found = {}
        for name, nullable, inner in fields:
            try:
                item = inner(value.get(name))
                if item is None and not nullable:
                    raise Misfit("is missing, and declared NOT NULL")
            except Misfit as misfit:
                raise misfit.at(f".{name}") from None
            found[name] = item
        return found

    return convert


def _unfit(wanted: str, value: Any) -> Misfit:
    return Misfit(f"is {_MSGPACK_NAMES.get(type(value), type(value).__name__)}, {wanted} does not hold it")


_MSGPACK_NAMES: dict[type, str] = {
    bool: "a boolean",
    int: "a whole number",
    float: "a float",
    str: "text",
    bytes: "binary",
    list: "an array",
    dict: "a map",
    msgpack.Timestamp: "a timestamp",
    msgpack.ExtType: "an extension",
}
