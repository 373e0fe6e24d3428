"""The outcome sink: rows say what became of jobs that ``mode=consume`` has read.

Every task settles its own rows at once. A task that is run again, or a batch, settles jobs that are settled already,
which does nothing; so there is nothing to commit and nothing to abort.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ByteType,
    DataType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StringType,
    StructType,
)

from chasqui import ConfigError, OptionError
from chasqui.bridge import FAIL, MAX_ERROR_BYTES, OK, RETRY, Outcome, Outcomes, Settled, checked_queue
from chasqui_spark.encoding import check_packable
from chasqui_spark.entry_rows import cells, entry_ids, packed, queue_of, refuse_doubled
from chasqui_spark.links import link_of
from chasqui_spark.options import SettleOptions
from chasqui_spark.worker_logs import show_logs

log = logging.getLogger("chasqui.spark.settle")

OUTCOMES = (OK, RETRY, FAIL)
_WHOLE: tuple[type[DataType], ...] = (LongType, IntegerType, ShortType, ByteType)
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

    def tell(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log what became of the batch, for whoever looks for jobs."""
        show_logs()
        total = sum((one.settled for one in messages if isinstance(one, SettledMessage)), Settled())
        log.info(
            "outcomes: %d done, %d to be retried, %d dead letters; %d were settled before, or are others' jobs by now",
            *(total.done, total.retried, total.dead, total.gone),
        )


class SettledMessage(WriterCommitMessage):
    """What one task has settled."""

    def __init__(self, settled: Settled) -> None:
        self.settled = settled


class OutcomeSink(DataSourceArrowWriter):
    def __init__(self, options: SettleOptions, schema: StructType) -> None:
        self._core = _Core(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._core.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Everything is settled already."""
        self._core.tell(messages)


class OutcomeStreamSink(DataSourceStreamArrowWriter):
    def __init__(self, options: SettleOptions, schema: StructType) -> None:
        self._core = _Core(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._core.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Everything is settled already."""
        self._core.tell(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is settled stays settled: its run is over, whatever became of the batch."""


def check_columns(options: SettleOptions, schema: StructType) -> None:
    """Refuse columns that are missing, unknown or of another type, before anything is settled."""
    kinds = {field.name: field.dataType for field in schema}
    if options.queue is not None:
        checked_queue(options.queue)
    needed = {"entry_id", "outcome"} if options.queue is not None else {"queue", "entry_id", "outcome"}
    refuse_doubled(schema.names)
    for name in sorted(needed - kinds.keys()):
        raise OptionError(f"outcomes need a column {name}; got {', '.join(kinds) or 'none'}")
    for name, kind in kinds.items():
        if name not in _COLUMNS:
            raise OptionError(f"unknown column {name!r:.80} in outcomes; known: {', '.join(_COLUMNS)}")
        wanted = _COLUMNS[name]
        if wanted is None:
            if options.store_results:
                check_packable(name, kind)
        elif not isinstance(kind, wanted) and not (name not in needed and isinstance(kind, NullType)):
            expected = "a whole number" if wanted is _WHOLE else wanted[0].__name__.removesuffix("Type").lower()
            raise OptionError(f"column {name} expects {expected}, got {kind.simpleString()}")


def by_queue(batch: pa.RecordBatch, options: SettleOptions) -> dict[str, list[Outcome]]:
    """The rows as outcomes, by queue; of several rows of one job the first. ``ConfigError`` names a row that says
    nothing that can be done.
    """
    entries = entry_ids(batch)
    rest = [cells(batch, name) for name in ("queue", "outcome", "error", "delay_ms")]
    results = packed(batch, "result", entries) if options.store_results else [None] * len(entries)
    found: dict[str, dict[str, Outcome]] = {}
    for entry, result, queue, outcome, error, delay_ms in zip(entries, results, *rest, strict=True):
        if outcome not in OUTCOMES:
            raise ConfigError(
                f"column outcome of entry {entry} expects one of {', '.join(OUTCOMES)}; got {outcome!r:.80}"
            )
        text = (error or "").encode(errors="replace")[:MAX_ERROR_BYTES].decode(errors="ignore")
        told = Outcome(entry.encode(), outcome, result, text, delay_ms=delay_ms)
        found.setdefault(queue_of(options.queue, queue, entry), {}).setdefault(entry, told)
    return {queue: list(outcomes.values()) for queue, outcomes in found.items()}
