"""What the sinks of outcomes and of dead letters share: rows that name an entry of a queue and carry a value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from chasqui import ConfigError, OptionError
from chasqui.bridge import checked_queue, id_parts
from chasqui_spark.packing import BAD_VALUES, packer, values

_ID = re.compile(r"(0|[1-9]\d{0,19})-(0|[1-9]\d{0,19})", re.ASCII)


def refuse_doubled(names: Sequence[str]) -> None:
    """Of two columns of one name nobody knows which is meant."""
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise OptionError(f"column {', '.join(doubled)} stands twice in the DataFrame: rename or drop one")


def cells(batch: pa.RecordBatch, name: str) -> list[Any]:
    """A column's values; nulls where there is no such column."""
    return batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows


def entry_ids(batch: pa.RecordBatch) -> list[str]:
    """The column ``entry_id``: ids as they were read, so that one entry has one spelling."""
    found = cells(batch, "entry_id")
    for entry_id in found:
        if not isinstance(entry_id, str) or not _ID.fullmatch(entry_id) or max(id_parts(entry_id)) >= 2**64:
            raise ConfigError(
                f"column entry_id expects an id as it was read, such as 1795000000000-0; got {entry_id!r:.80}"
            )
    return found


def packed(batch: pa.RecordBatch, name: str, entries: Sequence[str]) -> list[bytes | None]:
    """A column as MessagePack, encoded as jobs' payloads are; binary is MessagePack already, null is None."""
    if name not in batch.schema.names:
        return [None] * batch.num_rows
    column, pack = batch.column(name), packer()
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return cells(batch, name)
    try:
        found = values(column)
        return [None if value is None else pack(value) for value in found]
    except BAD_VALUES:
        return [_packed_cell(column.slice(row, 1), name, entry) for row, entry in enumerate(entries)]


def _packed_cell(cell: pa.Array, name: str, entry: str) -> bytes | None:
    try:
        (value,) = values(cell)
        return None if value is None else packer()(value)
    except BAD_VALUES as error:
        raise ConfigError(f"column {name} of entry {entry}: {type(error).__name__} {error}"[:400]) from None


def queue_of(option: str | None, cell: str | None, entry: str) -> str:
    """Where a row's entry is: the option wins over the column."""
    queue = option if option is not None else cell
    if queue is None:
        raise ConfigError(f"column queue is null for entry {entry}: give the queue there, or as an option")
    return checked_queue(queue)
