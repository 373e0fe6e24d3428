"""The outcome sink: rows say what became of jobs that ``mode=consume`` has read.

Every task settles its own rows at once. A task that is run again, or a batch, settles jobs that are settled already,
which does nothing; so there is nothing to commit and nothing to abort.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import DataType, IntegerType, LongType, ShortType, StringType, StructType

from chasqui import ConfigError, OptionError, PayloadError
from chasqui.bridge import FAIL, OK, RETRY, Outcome, Outcomes, PayloadCodec, Settled, checked_queue
from chasqui_spark.links import link_of
from chasqui_spark.options import SettleOptions

OUTCOMES = (OK, RETRY, FAIL)
_WHOLE: tuple[type[DataType], ...] = (LongType, IntegerType, ShortType)
_COLUMNS: dict[str, tuple[type[DataType], ...] | None] = {
    "queue": (StringType,),
    "entry_id": (StringType,),
    "outcome": (StringType,),
    "result": None,
    "error": (StringType,),
    "delay_ms": _WHOLE,
}


def settle_batch_writer(options: SettleOptions, schema: StructType) -> DataSourceWriter:
    """For ``df.write``, inside ``foreachBatch``."""
    return OutcomeSink(options, schema)


def settle_stream_writer(options: SettleOptions, schema: StructType) -> DataSourceStreamWriter:
    """For ``df.writeStream``."""
    return cast(DataSourceStreamWriter, OutcomeStreamSink(options, schema))


class _Core:
    """Checked options and columns; what runs in tasks."""

    def __init__(self, options: SettleOptions, schema: StructType) -> None:
        check_columns(options, schema)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options, total = self._options, Settled()
        for batch in iterator:
            for queue, told in by_queue(batch, options).items():
                total += Outcomes(link_of(options), queue, options).settle(told)
        return SettledMessage(total)


class SettledMessage(WriterCommitMessage):
    """What one task has settled."""

    def __init__(self, settled: Settled) -> None:
        self.settled = settled


class OutcomeSink(DataSourceArrowWriter):
    def __init__(self, options: SettleOptions, schema: StructType) -> None:
        self._core = _Core(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._core.write(iterator)


class OutcomeStreamSink(DataSourceStreamArrowWriter):
    def __init__(self, options: SettleOptions, schema: StructType) -> None:
        self._core = _Core(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._core.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Everything is settled already."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is settled stays settled: its run is over, whatever became of the batch."""


def check_columns(options: SettleOptions, schema: StructType) -> None:
    """Refuse columns that are missing, unknown or of another type, before anything is settled."""
    kinds = {field.name: field.dataType for field in schema}
    needed = {"entry_id", "outcome"} if options.queue is not None else {"queue", "entry_id", "outcome"}
    for name in sorted(needed - kinds.keys()):
        raise OptionError(f"outcomes need a column {name}; got {', '.join(kinds) or 'none'}")
    for name, kind in kinds.items():
        if name not in _COLUMNS:
            raise OptionError(f"unknown column {name!r:.80} in outcomes; known: {', '.join(_COLUMNS)}")
        wanted = _COLUMNS[name]
        if wanted is not None and not isinstance(kind, wanted):
            expected = "a whole number" if wanted is _WHOLE else wanted[0].__name__.removesuffix("Type").lower()
            raise OptionError(f"column {name} expects {expected}, got {kind.simpleString()}")


def by_queue(batch: pa.RecordBatch, options: SettleOptions) -> dict[str, list[Outcome]]:
    """The rows as outcomes, by queue; ``ConfigError`` for a row that says nothing that can be done."""
    count = batch.num_rows
    columns: dict[str, list[Any]] = {
        name: batch.column(name).to_pylist() if name in batch.schema.names else [None] * count for name in _COLUMNS
    }
    codec = PayloadCodec()
    found: dict[str, list[Outcome]] = {}
    for queue, entry_id, outcome, result, error, delay_ms in zip(*columns.values(), strict=True):
        if outcome not in OUTCOMES:
            raise ConfigError(f"column outcome expects one of {', '.join(OUTCOMES)}; got {outcome!r:.80}")
        if not isinstance(entry_id, str) or not entry_id.replace("-", "", 1).isdecimal():
            raise ConfigError(f"column entry_id expects the entry_id of a job that was read, got {entry_id!r:.80}")
        packed = None
        if result is not None and options.store_results:
            try:
                packed = result if isinstance(result, bytes) else codec.pack(result)
            except PayloadError as unfit:
                raise ConfigError(f"column result of entry {entry_id}: {unfit.message}") from None
        name = options.queue or queue
        if name is None:
            raise ConfigError(f"column queue is null for entry {entry_id}: give the queue there, or as an option")
        if name not in found:
            found[checked_queue(name)] = []
        told = Outcome(entry_id.encode(), outcome, packed, error or "", delay_ms=delay_ms)
        found[name].append(told)
    return found
