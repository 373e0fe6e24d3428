"""Arrow columns -> MessagePack payloads, the same bytes that the engine's Producer writes for the same values.

Column by column, and in C where it can be: a row costs a third of a microsecond. What MessagePack does not have:

    decimal          text, in full (`12.50`), as JSON writers do
    timestamp        MessagePack's own timestamp, as Producer(datetimes=True) writes it
    timestamp_ntz    ISO text without a zone, because it has none
    date, time       ISO text
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import chain, pairwise, repeat
from typing import Any

import msgpack
import pyarrow as pa
from pyarrow import types as kinds

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (wall-clock times have no zone)
# What goes wrong with single values: out of Python's range, not UTF-8, deeper than MessagePack's writer goes.
BAD_VALUES = (ValueError, OverflowError, TypeError, RecursionError, pa.ArrowException)


def packer() -> Callable[[Any], bytes]:
    """Packs one value; not to be shared by threads."""
    pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True).pack
    return pack


def payloads_of_rows(names: Sequence[str], columns: Sequence[Sequence[Any]], rows: int) -> list[bytes]:
    """Each row as a map. Written as a flat array of keys and values, whose header is then exchanged: one call into C
    a row, and no dict.
    """
    if not names:
        return [b"\x80"] * rows
    pairs = chain.from_iterable((repeat(name), column) for name, column in zip(names, columns, strict=True))
    header = msgpack.Packer().pack_map_header(len(names))
    skip = 1 if len(names) * 2 < 16 else 3 if len(names) * 2 < 1 << 16 else 5
    return [header + packed[skip:] for packed in map(packer(), zip(*pairs, strict=False))]


def payloads_of_values(column: Sequence[Any]) -> list[bytes]:
    """Each value by itself."""
    return list(map(packer(), column))


def payloads_as_given(column: Sequence[bytes | None]) -> list[bytes]:
    """Values that are MessagePack already; null is nil."""
    return [b"\xc0" if value is None else value for value in column]


def values(column: pa.Array) -> list[Any]:
    """A column's values as MessagePack takes them; nulls are None."""
    kind = column.type
    if _plain(kind):
        return list(column.to_pylist())
    if kinds.is_struct(kind):
        inner = [values(child) for child in column.flatten()]
        names = [kind.field(i).name for i in range(kind.num_fields)]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*inner, strict=True)] if inner else [{}] * len(column)
        return _masked(column, rows)
    if kinds.is_map(kind):
        return _masked(column, [dict(pairs) for pairs in _lists(column, _pairs)])
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return _masked(column, _lists(column, lambda child: values(child.values)))
    if kinds.is_decimal(kind):
        return [None if value is None else format(value, "f") for value in column.to_pylist()]
    if kinds.is_timestamp(kind):
        ticks = column.cast(pa.timestamp("us", kind.tz)).view(pa.int64()).to_pylist()
        return [None if tick is None else _moment(tick) if kind.tz else _wall_clock(tick) for tick in ticks]
    if kinds.is_date(kind) or kinds.is_time(kind):
        return [None if value is None else value.isoformat() for value in column.to_pylist()]
    raise TypeError(f"{kind} has no form in MessagePack")


def _plain(kind: pa.DataType) -> bool:
    """Types whose values Arrow gives out as MessagePack takes them."""
    if kinds.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        return len(set(names)) == len(names) and all(_plain(kind.field(i).type) for i in range(kind.num_fields))
    if kinds.is_map(kind):
        return False
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return _plain(kind.value_type)
    return bool(
        kinds.is_null(kind)
        or kinds.is_boolean(kind)
        or kinds.is_integer(kind)
        or kinds.is_floating(kind)
        or kinds.is_string(kind)
        or kinds.is_large_string(kind)
        or kinds.is_binary(kind)
        or kinds.is_large_binary(kind)
    )


def _lists(column: pa.Array, inner: Callable[[Any], list[Any]]) -> list[list[Any]]:
    """The elements of each list; the children are converted at once and cut apart."""
    offsets = column.offsets.to_pylist()
    first, last = offsets[0], offsets[-1]
    found = inner(_Children(column, first, last - first))
    return [found[start - first : stop - first] for start, stop in pairwise(offsets)]


class _Children:
    """The part of a list's or map's children that a slice of the column refers to."""

    def __init__(self, column: pa.Array, first: int, count: int) -> None:
        self._column, self._first, self._count = column, first, count

    @property
    def values(self) -> pa.Array:
        return self._column.values.slice(self._first, self._count)

    @property
    def keys(self) -> pa.Array:
        return self._column.keys.slice(self._first, self._count)

    @property
    def items(self) -> pa.Array:
        return self._column.items.slice(self._first, self._count)


def _pairs(children: _Children) -> list[Any]:
    return list(zip(values(children.keys), values(children.items), strict=True))


def _masked(column: pa.Array, found: list[Any]) -> list[Any]:
    if not column.null_count:
        return found
    return [value if valid else None for value, valid in zip(found, column.is_valid().to_pylist(), strict=True)]


def _moment(tick: int) -> msgpack.Timestamp:
    seconds, micros = divmod(tick, 1_000_000)
    return msgpack.Timestamp(seconds, micros * 1000)


def _wall_clock(tick: int) -> str:
    return (_EPOCH + timedelta(microseconds=tick)).isoformat()
