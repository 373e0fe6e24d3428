"""``mode=consume``: Spark as a member of the queue's consumer group, beside ordinary workers.

The order that everything rests on: jobs are taken and written into a manifest before Spark logs the batch, and settled
after Spark has committed it. Killed in between, the next driver finds the manifest by the number in Spark's log, or, if
the log was not reached, by looking for the number that would come next.

Three processes know this class. Planning ones make it and throw it away: making it does nothing. The one that lives as
long as the query's run is asked for offsets and partitions; it holds the claims. Tasks call ``read``.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from chasqui import ChasquiError, ConfigError, OptionError
from chasqui.bridge import BatchJobs, Claims, Limits, Outcomes, Piece, Position, SettleTerms, Standing, spell
from chasqui_spark.collecting import freeze_once, paused
from chasqui_spark.consume_offsets import ConsumeOffset, batches, parse
from chasqui_spark.links import link_of
from chasqui_spark.options import SourceOptions, connection_of
from chasqui_spark.planning import fair_order, partitions_wanted, share
from chasqui_spark.ranges import cores
from chasqui_spark.rows import Rows
from chasqui_spark.sifting import sift
from chasqui_spark.source import close_all, found_queues, named_queues, reading
from chasqui_spark.views import check_schema
from chasqui_spark.worker_logs import show_logs

log = logging.getLogger("chasqui.spark")

MAX_JOBS = 100_000
_ANY = 2**53
_GRACE_S = 5.0
_ROLES_S = 0.3
_FIGURES_EVERY_S = 1.0
_NOT_CONSUME = ("starting_offsets", "starting_timestamp")


class BatchPartition(InputPartition):
    """Jobs of one batch that one task reads."""

    def __init__(self, queue: str, sid: str, seq: int, token: int, pieces: Sequence[Piece]) -> None:
        super().__init__(None)
        self.queue, self.sid, self.seq, self.token, self.pieces = queue, sid, seq, token, tuple(pieces)

    def __repr__(self) -> str:
        jobs = sum(stop - start for _, start, stop in self.pieces)
        return f"BatchPartition({self.queue}, batch {self.seq}, {jobs} jobs)"


class ConsumeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Takes jobs, has Spark run them, and settles what Spark has committed."""

    # Jobs that a task has read may be at work in a second Python process behind it. Spark looks after two seconds
    # whether a stopped task has left it, and kills it two seconds later (spark.python.task.killTimeout).
    _lingers_s = 5.0

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(options, schema)
        named_queues(options)
        for name in _NOT_CONSUME:
            if getattr(options, name) is not None:
                raise OptionError(
                    f"{spell(name, 'spark')} goes with mode=observe; mode=consume takes what the group has yet to do"
                )
        if not options.group.strip():
            raise OptionError("group expects a name, got an empty one")
        self._options = options
        self._sid: str | None = None
        self._claims: Claims | None = None
        self._roles: Standing | None = None
        self._queues: list[str] = []
        self._looked_at: float | None = None
        self._targets: dict[str, str] | None = None
        self._settled: dict[str, int] = {}
        self._planned = self._committed = ""
        self._turn = 0
        self._figures: tuple[float, dict[str, Any]] | None = None

    # --- What Spark asks for ---

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """Constant: the sid is minted when the first jobs are taken."""
        return ConsumeOffset().json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_jobs_per_trigger or MAX_JOBS)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note where the streams end now. What comes later, retries of this run included, is for the next one."""
        self._targets = self._ends()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Settle up to ``start``, which is in Spark's commit log, then take the next jobs; ``start`` if there are
        none.
        """
        before = parse(start)
        claims = self._joined(before.sid)
        self._settle(claims, before)
        upto = self._targets
        most, size = _ANY, self._options.max_bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            most = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        elif isinstance(limit, ReadAllAvailable):
            upto = upto or self._ends()  # all that is there now, or a fast producer would keep it going for ever
        seq = dict(before.seq)
        order = self._order(upto)
        for left, queue in zip(range(len(order), 0, -1), order, strict=True):
            wanted, room = share(most, left), None if size is None else share(size, left)
            if wanted < 1 or room == 0:
                break
            number = seq.get(queue, 0) + 1
            taken = claims.claim(
                queue, number, limit=wanted, max_bytes=room, upto="" if upto is None else upto.get(queue, "0-0")
            )
            self._stand_by(queue)
            if taken:
                seq[queue] = number
                most -= taken
                size = None if size is None else max(0, size - claims.claimed_bytes)
        return ConsumeOffset(self._sid, seq).json() if seq != before.seq else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The jobs between two offsets. After a crash Spark asks for a logged batch without ``latestOffset`` before."""
        begin = _text(start)
        if begin == self._planned != self._committed:
            raise ConfigError(
                "Spark plans a batch before it has committed the one before (asyncProgressTrackingEnabled): "
                "mode=consume settles jobs by that commit and cannot work so; leave the option out"
            )
        first, last = parse(start), parse(end)
        claims = self._joined(last.sid)
        found: list[InputPartition] = []
        planned = {batch: claims.plan(*batch) for batch in batches(first, last)}
        jobs = sum(sum(plan.sizes) for plan in planned.values())
        wanted = partitions_wanted(jobs, self._options.min_partitions, cores())
        each = min(-(-jobs // wanted), self._options.jobs_per_partition or jobs) or 1
        for (queue, number), plan in planned.items():
            self._stand_by(queue)
            parts = cut(plan.sizes, each)
            found += [BatchPartition(queue, str(last.sid), number, plan.token, part) for part in parts]
        self._planned = _text(end)
        return found

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has committed up to here. It tells with the next batch only, so this is the last of three places."""
        offset = parse(end)
        self._committed = _text(end)
        if offset.sid is not None:
            self._settle(self._joined(offset.sid), offset)

    def stop(self) -> None:
        """The driver is gone. What is in flight stays as it is: the next driver goes on with it."""
        if self._roles is not None:
            self._roles.stop(_ROLES_S)
        if self._claims is not None:
            self._claims.close()
        close_all()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Figures of the queues for StreamingQueryProgress, at most a second old; without them the query goes on."""
        now = time.monotonic()
        if self._figures is None or now - self._figures[0] >= _FIGURES_EVERY_S:
            try:
                with reading(self._options) as reader:
                    stats = reader.stats(self._queues, self._options.group)
            except ChasquiError as error:
                log.warning("no figures for the progress: %s", error)
                return None
            queues = {q: asdict(one) | {"depth": one.waiting + one.pending} for q, one in sorted(stats.items())}
            self._figures = (now, {"queues": queues, "v": 1})
        return self._figures[1]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task: the jobs as rows."""
        with self._task(partition) as (jobs, pieces):
            yield from self._rows(jobs, pieces)

    @contextmanager
    def _task(self, partition: InputPartition) -> Iterator[tuple[BatchJobs, Sequence[Piece]]]:
        """While a task is at work: the batch, and what to read of it, which is nothing where it is too late."""
        if not isinstance(partition, BatchPartition):
            raise TypeError(f"expected a BatchPartition, got {type(partition).__name__}")
        about = {"queue": partition.queue, "group": self._options.group, "sid": partition.sid}
        jobs = BatchJobs(link_of(self._options), **about, seq=partition.seq, token=partition.token)
        context = TaskContext.get()
        run = context.getLocalProperty("spark.jobGroup.id") if context is not None else None
        with jobs.task(run or "unknown") as begun:
            yield jobs, partition.pieces if begun else ()

    def _rows(self, jobs: BatchJobs, pieces: Sequence[Piece]) -> Iterator[pa.RecordBatch]:
        """What is no job, or has no run left, goes to the dead letters here."""
        options, queue = self._options, jobs.queue
        rows, limits = Rows(options), Limits(options.max_attempts, options.max_payload_bytes)
        outcomes = Outcomes(link_of(options), queue, options)
        keep_bad = options.bad_jobs in ("null", "fail")
        pages = jobs.job_pages(pieces)
        while True:
            with paused():
                page = next(pages, None)
                if page is None:
                    break
                batch, letters = sift(rows, queue, page, limits, keep_bad=keep_bad)
            if letters:
                outcomes.bury(letters, jobs.consumer, options.group)
            if batch.num_rows:
                yield batch
        if jobs.vanished:
            log.warning(
                "queue %r: %d jobs of batch %d are gone: settled before, or deleted", queue, jobs.vanished, jobs.seq
            )
        freeze_once()

    # --- The driver's process ---

    def _joined(self, sid: str | None) -> Claims:
        """This checkpoint's claims. The sid is that of the offset, or minted with the first jobs and then kept."""
        if self._claims is not None and sid in (None, self._sid):
            return self._claims
        if self._claims is not None:
            if self._planned:
                raise ConfigError("the offsets of this query belong to two different checkpoints")
            self._claims.close()
        show_logs()
        options = self._options
        self._sid = sid or uuid.uuid4().hex
        terms = {f.name: getattr(options, f.name) for f in fields(SettleTerms)}
        self._claims = Claims(
            connection_of(options),
            sid=self._sid,
            terms=SettleTerms(**terms),
            lease_ttl_ms=options.lease_ttl,
            max_batch_runs=options.max_batch_runs,
            label=options.consumer,
        )
        if threading.current_thread() is threading.main_thread():
            # Spark ends this process so when the query stops; it asks no method of ours before.
            signal.signal(signal.SIGTERM, self._leave)
        return self._claims

    def _leave(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if self._roles is not None:
                self._roles.stop(_ROLES_S)
            if self._claims is not None:
                released = self._claims.leave(_GRACE_S, self._lingers_s)
                if released:
                    log.info("the query was stopped: %d jobs are given back", released)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the process ends now
            log.warning("the query was stopped, and its jobs stay claimed until they are stale: %s", error)
        logging.shutdown()
        os._exit(0)

    def _settle(self, claims: Claims, offset: ConsumeOffset) -> None:
        for queue, number in offset.seq.items():
            if self._settled.get(queue) != number:
                claims.settle(queue, number)
                self._settled[queue] = number

    def _stand_by(self, queue: str) -> None:
        """Promote and repeat the queue's jobs from here, as a worker does, so that a deployment of Spark alone
        works.
        """
        if self._roles is None:
            options = self._options
            self._roles = Standing(
                connection_of(options), options, promoter=options.run_promoter, scheduler=options.run_scheduler
            )
        self._roles.add(queue)

    def _wanted(self) -> list[str]:
        now = time.monotonic()
        due = self._looked_at is None or (now - self._looked_at) * 1000 >= self._options.discovery_interval
        if not self._queues or (due and self._options.queue_pattern is not None):
            with reading(self._options) as reader:
                self._queues, self._looked_at = found_queues(self._options, reader), now
        return self._queues

    def _ends(self) -> dict[str, str]:
        """The newest entry of each queue's stream."""
        queues = self._wanted()
        with reading(self._options) as reader:
            positions = reader.positions("jobs", queues)
        return {q: p.last_id if isinstance(p, Position) else "0-0" for q, p in positions.items()}

    def _order(self, upto: dict[str, str] | None) -> list[str]:
        """Queues with few jobs first, so that what they leave of the limit goes to the others."""
        queues = self._wanted() if upto is None else sorted(upto)
        if len(queues) < 2:
            return queues
        with reading(self._options) as reader:
            found = reader.positions("jobs", queues)
        self._turn += 1
        scarce = (self._options.max_jobs_per_trigger or MAX_JOBS) < len(queues)
        lengths = {q: p.length if isinstance(p, Position) else 0 for q, p in found.items()}
        return fair_order(lengths, self._turn if scarce else 0)


def cut(sizes: Sequence[int], each: int) -> list[list[Piece]]:
    """Blocks of these sizes cut and put together into parts of ``each`` jobs; the last one may have fewer."""
    parts: list[list[Piece]] = []
    room = 0
    for block, size in enumerate(sizes, 1):
        start = 0
        while start < size:
            if room == 0:
                parts.append([])
                room = each
            stop = min(size, start + room)
            parts[-1].append((block, start, stop))
            room -= stop - start
            start = stop
    return parts


def _text(offset: dict[str, Any]) -> str:
    return json.dumps(offset, sort_keys=True)
