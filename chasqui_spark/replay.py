"""Triage of dead letters: read the view ``dlq``, filter and repair with SQL, write back with ``replayFrom``.

Rows need ``queue`` (or the option) and ``entry_id``; ``payload`` and ``name`` replace what the job had, where they are
there and not null; the view's other columns may stay, and say nothing. Every task puts its own rows back, each letter
once: what a task that failed has put back is not there for the next one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StringType, StructType

from chasqui import ConfigError, OptionError, PayloadError
from chasqui.bridge import Pace, PayloadCodec, Repaired, Replays, checked_queue
from chasqui_spark.links import link_of
from chasqui_spark.options import ReplayOptions

# The columns that the view has: letters may go back as they came.
_OF_THE_VIEW = frozenset(
    {
        *("queue", "entry_id", "id", "name", "payload", "created_at", "enqueued_at", "attempt", "retry"),
        *("source_id", "reason", "detail", "failure", "error"),
    }
)


def replay_writer(options: ReplayOptions, schema: StructType) -> DataSourceWriter:
    """For ``df.write``."""
    return ReplaySink(options, schema)


class ReplayedMessage(WriterCommitMessage):
    """How many letters one task has put back."""

    def __init__(self, moved: int) -> None:
        self.moved = moved


class ReplaySink(DataSourceArrowWriter):
    """All tasks of one write share one pace: its id is made here, on the driver."""

    def __init__(self, options: ReplayOptions, schema: StructType) -> None:
        check_columns(options, schema)
        self._options = options
        limit = options.max_per_second
        self._pace = None if limit is None else Pace(limit, uuid.uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options, moved = self._options, 0
        for batch in iterator:
            for queue, letters in by_queue(batch, options).items():
                replays = Replays(
                    link_of(options),
                    queue,
                    max_stream_len=options.max_stream_len,
                    wait_for_room_ms=options.block_timeout if options.overflow == "block" else 0,
                    max_payload_bytes=options.max_payload_bytes,
                    pace=self._pace,
                )
                moved += replays.put_back(letters)
        return ReplayedMessage(moved)


def check_columns(options: ReplayOptions, schema: StructType) -> None:
    """Refuse what cannot be meant, before anything is moved."""
    kinds = {field.name: field.dataType for field in schema}
    for name in ("entry_id",) if options.queue is not None else ("queue", "entry_id"):
        if name not in kinds:
            raise OptionError(f"dead letters need a column {name}; got {', '.join(kinds) or 'none'}")
    unknown = sorted(kinds.keys() - _OF_THE_VIEW)
    if unknown:
        raise OptionError(
            f"unknown column {unknown[0]!r:.80} in dead letters; what is put into payload goes back, "
            f"other columns are those of the view dlq"
        )
    for name in ("queue", "entry_id", "name"):
        if name in kinds and not isinstance(kinds[name], StringType):
            raise OptionError(f"column {name} expects string, got {kinds[name].simpleString()}")


def by_queue(batch: pa.RecordBatch, options: ReplayOptions) -> dict[str, list[Repaired]]:
    """The rows as letters to be put back, by queue."""
    rows: dict[str, list[Any]] = {
        name: batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows
        for name in ("queue", "entry_id", "payload", "name")
    }
    codec = PayloadCodec()
    found: dict[str, list[Repaired]] = {}
    for queue, entry_id, payload, name in zip(*rows.values(), strict=True):
        if not isinstance(entry_id, str) or not entry_id.replace("-", "", 1).isdecimal():
            raise ConfigError(f"column entry_id expects that of a dead letter that was read, got {entry_id!r:.80}")
        try:
            packed = payload if payload is None or isinstance(payload, bytes) else codec.pack(payload)
        except PayloadError as error:
            raise ConfigError(f"column payload of dead letter {entry_id}: {error.message}") from None
        of = options.queue or queue
        if of is None:
            raise ConfigError(f"column queue is null for dead letter {entry_id}: give the queue there, or as an option")
        found.setdefault(checked_queue(of), []).append(Repaired(entry_id, packed, name))
    return found
