"""The sink: tasks encode rows and stage them, or add them at once; the driver publishes what was staged, once.

``write`` runs on executors, ``commit`` and ``abort`` on the driver, each in a process of its own: what they must know
of each other is in the messages. Spark calls ``abort`` also after a ``commit`` that failed half way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from chasqui import ChasquiError, ConfigError, OptionError
from chasqui.bridge import DirectWriter, Room, Staged, Stager, Terms, Transactions
from chasqui_spark.collecting import freeze_once, paused
from chasqui_spark.encoding import BadRow, Encoder, complaint
from chasqui_spark.options import ReplayOptions, SettleOptions, SinkOptions, connection_of, writes_of
from chasqui_spark.worker_logs import show_logs

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger("chasqui.spark.sink")

_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass(frozen=True)
class Identity:
    """Which writer, and which of its versions; ``query`` where a version belongs to one query alone."""

    app_id: str
    version: int
    query: str = ""


@dataclass
class Written(WriterCommitMessage):
    """What a task tells the driver. Without ``staged`` it wrote nothing because its version was there already, or, with
    no identity, because everything is in the queues.
    """

    identity: Identity | None = None
    staged: Staged | None = None
    rows: int = 0
    bad: int = 0
    letters: int = 0
    sample: str = ""


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """The writer of ``df.write``, of the kind that the options ask for."""
    options = _checked(given, overwrite)
    if isinstance(options, SettleOptions):
        from chasqui_spark.settle import settle_batch_writer

        return settle_batch_writer(options, schema)
    if isinstance(options, ReplayOptions):
        from chasqui_spark.replay import replay_writer

        return replay_writer(options, schema)
    return BatchSink(options, schema)


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """The writer of ``df.writeStream``."""
    options = _checked(given, overwrite, streaming=True)
    if isinstance(options, SettleOptions):
        from chasqui_spark.settle import settle_stream_writer

        return settle_stream_writer(options, schema)
    if isinstance(options, ReplayOptions):
        raise OptionError("replayFrom works with df.write; read the dead letters with spark.read")
    return cast(DataSourceStreamWriter, StreamSink(options, schema))


def _checked(
    given: Mapping[str, str], overwrite: bool, *, streaming: bool = False
) -> SinkOptions | SettleOptions | ReplayOptions:
    if overwrite:
        how = "outputMode complete" if streaming else "mode overwrite"
        raise OptionError(
            f"{how} would have to delete jobs that workers are running; a queue is appended to: use append"
            + (" or update" if streaming else "")
        )
    return writes_of(given)


class BatchSink(DataSourceArrowWriter):
    """``df.write``: a transaction where it has a number, else added at once."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        identity = None
        if options.txn_app_id is not None and options.txn_version is not None:
            identity = Identity(options.txn_app_id, options.txn_version)
        elif options.txn_app_id is not None or options.delivery == "exactlyOnce":
            raise OptionError(
                "a batch is written exactly once under a name and a number: give txnAppId and txnVersion, the same "
                "ones when the same batch is written again"
            )
        self._identity = identity
        older = options.txn_older or "skip"
        self._of_stream = older == "fail"
        self._core = _Core(options, schema, older=older)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        identity = self._identity
        if identity is not None and self._of_stream:
            identity = replace(identity, query=_local(_QUERY) or "")
        return self._core.write(iterator, identity)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._core.commit(_ours(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._core.abort(_ours(messages))


class StreamSink(DataSourceStreamArrowWriter):
    """``df.writeStream``: the query's id is the writer, the batch's number the version."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        if options.txn_version is not None:
            raise OptionError("txnVersion numbers batches of df.write; a stream's are numbered by Spark: leave it out")
        self._once = options.delivery != "atLeastOnce"
        self._app_id = options.txn_app_id
        self._core = _Core(options, schema, older=options.txn_older or "fail")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._core.write(iterator, _identity_of_task(self._app_id) if self._once else None)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        ours = _ours(messages)
        for message in ours:
            if message.identity is not None and message.identity.version != batchId:
                raise ConfigError(
                    f"batch {batchId} got rows that were staged as batch {message.identity.version}: not published"
                )
        self._core.commit(ours)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        self._core.abort(_ours(messages))


class _Core:
    """What batches and streams share. Goes to the executors, so it holds values only and no connection."""

    def __init__(self, options: SinkOptions, schema: StructType, *, older: str) -> None:
        self._options = options
        self._older = older
        self._encoder = Encoder(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch], identity: Identity | None) -> Written:
        show_logs()
        with paused():
            message = self._written(iterator, identity)
        freeze_once()
        return message

    def _written(self, iterator: Iterator[pa.RecordBatch], identity: Identity | None) -> Written:
        if identity is None:
            room = Room.of(self._options.max_stream_len, self._options.overflow, self._options.block_timeout)
            with DirectWriter(
                connection_of(self._options), room, dlq_max_stream_len=self._options.dlq_max_stream_len
            ) as direct:
                return self._all(iterator, direct, Written())
        with Stager(connection_of(self._options), stage_ttl_ms=self._options.stage_ttl) as stager:
            if stager.is_there(identity.app_id, identity.version, older=self._older):
                return Written(identity, rows=sum(batch.num_rows for batch in iterator))
            message = self._all(iterator, stager, Written(identity))
            message.staged = stager.finish()
            return message

    def commit(self, messages: Sequence[Written]) -> None:
        show_logs()
        rows, bad = sum(m.rows for m in messages), sum(m.bad for m in messages)
        if bad:
            kept = sum(m.letters for m in messages)
            first = next(m.sample for m in messages if m.sample)
            log.warning("%d of %d rows are no jobs, %d are in the dead letters; the first: %s", bad, rows, kept, first)
        found = {m.identity for m in messages if m.identity is not None}
        if not found:
            return
        if len(found) > 1:
            raise ConfigError(f"the tasks of one batch staged for {len(found)} versions; nothing was published")
        identity = found.pop()
        staged = [m.staged for m in messages if m.staged is not None]
        with Transactions(connection_of(self._options), self._terms()) as transactions:
            fresh = transactions.commit(
                identity.app_id,
                identity.version,
                staged,
                complete=len(staged) == len(messages),
                rows=rows,
                by=identity.query,
            )
        if fresh:
            log.info("writer %s: version %d is published, %d rows", identity.app_id, identity.version, rows - bad)

    def abort(self, messages: Sequence[Written]) -> None:
        show_logs()
        staged = [m.staged for m in messages if m.staged is not None]
        identity = next((m.identity for m in messages if m.staged is not None), None)
        if identity is None:
            return
        try:
            with Transactions(connection_of(self._options), self._terms()) as transactions:
                transactions.abort(identity.app_id, identity.version, staged)
        except ChasquiError as error:
            # What failed before is what the user must see; the stages expire by themselves.
            log.warning("staged rows of version %d could not be deleted, and expire: %s", identity.version, error)

    def _terms(self) -> Terms:
        options = self._options
        return Terms(
            overflow=options.overflow,
            max_stream_len=options.max_stream_len,
            block_timeout_ms=options.block_timeout,
            dlq_max_stream_len=options.dlq_max_stream_len,
            stage_ttl_ms=options.stage_ttl,
            ledger_ttl_ms=options.ledger_ttl,
            durability=options.durability,
            older=self._older,
        )

    def _all(self, iterator: Iterator[pa.RecordBatch], target: Stager | DirectWriter, message: Written) -> Written:
        """Every row, to whoever takes jobs."""
        encoder, how = self._encoder, self._options.bad_rows
        for batch in iterator:
            for piece in encoder.slices(batch):
                encoded = encoder.encode(piece, time.time_ns() // 1_000_000, message.rows)
                message.rows += piece.num_rows
                if encoded.bad:
                    found = [bad for bad, _, _ in encoded.bad]
                    self._count(message, found)
                    if how == "fail":
                        raise complaint(found, _partition())
                    if how == "dlq":
                        for bad, queue, letter in encoded.bad:
                            if queue is None:
                                raise complaint([bad], _partition())
                            target.add_dead(queue, letter)
                            message.letters += 1
                for queue, jobs in encoded.jobs:
                    target.add(queue, jobs)
        return message

    def _count(self, message: Written, bad: Sequence[BadRow]) -> None:
        message.bad += len(bad)
        message.sample = message.sample or f"partition {_partition()}, {bad[0]}"


def _identity_of_task(app_id: str | None) -> Identity:
    """Who writes, by what Spark tells its tasks; the same after a restart from the checkpoint."""
    query, batch = _local(_QUERY), _local(_BATCH)
    if batch is None or (app_id or query) is None:
        raise ConfigError(
            "Spark does not tell the task which query and batch it belongs to, so the rows cannot be written exactly "
            "once: set delivery=atLeastOnce, or write with foreachBatch(ChasquiSink(..., txn_app_id=...))"
        )
    return Identity(app_id or str(query), int(batch), query or "")


def _local(name: str) -> str | None:
    """What Spark tells the task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.getLocalProperty(name) if context else None


def _partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context else 0


def _ours(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """The messages of tasks that ended well."""
    return [message for message in messages if isinstance(message, Written)]
