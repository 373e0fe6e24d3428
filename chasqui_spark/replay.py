"""Triage of dead letters: read the view ``dlq``, filter and repair with SQL, write back with ``replayFrom``.

Rows need ``queue`` (or the option) and ``entry_id``; ``payload`` and ``name`` replace what the job had, where they are
there and not null; the view's other columns may stay, and say nothing. Every task puts its own rows back, each letter
once: what a task that failed has put back is not there for the next one.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, NullType, StringType, StructType

from chasqui import ConfigError, OptionError
from chasqui.bridge import Pace, Repaired, Replays, checked_queue, name_bytes
from chasqui_spark.encoding import check_packable
from chasqui_spark.entry_rows import cells, entry_ids, packed, queue_of, refuse_doubled
from chasqui_spark.links import link_of
from chasqui_spark.options import ReplayOptions
from chasqui_spark.worker_logs import show_logs

log = logging.getLogger("chasqui.spark.replay")

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
    """How many letters one task has had, and how many of them it has put back."""

    def __init__(self, letters: int, moved: int) -> None:
        self.letters, self.moved = letters, moved


class ReplaySink(DataSourceArrowWriter):
    """All tasks of one write share one pace: its id is made here, on the driver."""

    def __init__(self, options: ReplayOptions, schema: StructType) -> None:
        check_columns(options, schema)
        self._options = options
        limit = options.max_per_second
        self._pace = None if limit is None else Pace(limit, uuid.uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options, total, moved = self._options, 0, 0
        for batch in iterator:
            total += batch.num_rows
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
        return ReplayedMessage(total, moved)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Everything is back already."""
        show_logs()
        told = [one for one in messages if isinstance(one, ReplayedMessage)]
        letters, moved = sum(one.letters for one in told), sum(one.moved for one in told)
        log.info("%d of %d dead letters are put back; the others are not there any more", moved, letters)


def check_columns(options: ReplayOptions, schema: StructType) -> None:
    """Refuse what cannot be meant, before anything is moved."""
    kinds = {field.name: field.dataType for field in schema}
    refuse_doubled(schema.names)
    if options.queue is not None:
        checked_queue(options.queue)
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
        if name in kinds and not isinstance(kinds[name], StringType) and (name, kinds[name]) != ("name", NullType()):
            raise OptionError(f"column {name} expects string, got {kinds[name].simpleString()}")
    if not isinstance(kinds.get("payload", BinaryType()), BinaryType):
        check_packable("payload", kinds["payload"])


def by_queue(batch: pa.RecordBatch, options: ReplayOptions) -> dict[str, list[Repaired]]:
    """The rows as letters to be put back, by queue."""
    entries = entry_ids(batch)
    columns = (entries, packed(batch, "payload", entries), cells(batch, "queue"), cells(batch, "name"))
    found: dict[str, list[Repaired]] = {}
    for entry, payload, queue, name in zip(*columns, strict=True):
        try:
            name_bytes(name or "")
        except ConfigError as error:
            raise ConfigError(f"column name of entry {entry}: {error.message}") from None
        found.setdefault(queue_of(options.queue, queue, entry), []).append(Repaired(entry, payload, name))
    return found
