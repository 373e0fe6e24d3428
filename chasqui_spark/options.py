"""The connector's options, declared once. Spark spells them in camelCase, hands them over as text and ignores case."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from chasqui import OptionError
from chasqui.bridge import (
    ConnectionOptions,
    Settling,
    build,
    checked_app_id,
    checked_queue,
    name_bytes,
    option,
    parse_url,
    spell,
)

T = TypeVar("T", bound=ConnectionOptions)

VIEWS = ("jobs", "events", "dlq", "pending", "delayed", "repeatable", "results", "stats")
STREAMED_VIEWS = ("jobs", "events", "dlq")

# Options that are Spark's own, or that Spark adds to what the user wrote.
_SPARKS_OWN = frozenset(
    {
        "path",
        "paths",
        "checkpointlocation",
        "queryname",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
    }
)


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Settling, ConnectionOptions):
    """``spark.read`` and ``spark.readStream``."""

    queue: str | None = option(None, help="The queue. Exactly one of `queue`, `queues` and `queuePattern` is given.")
    queues: str | None = option(None, help="Several queues, as a comma list.")
    queue_pattern: str | None = option(None, help="All queues whose name matches this glob, such as `mail-*`.")
    discovery_interval: int = option(
        60_000, min=0, duration=True, help="How often to look for new queues of the pattern."
    )
    view: str = option("jobs", choices=VIEWS, help="What to read; `jobs`, `events` and `dlq` also as a stream.")
    mode: str = option(
        "observe",
        choices=("observe", "consume"),
        help="`observe` has no side effect of any kind; `consume` takes jobs as a worker does (view `jobs`, streams).",
    )
    starting_offsets: str | None = option(
        None, help='`earliest` (the default), `latest`, or JSON: `{"queue": "entry-id"}`.'
    )
    ending_offsets: str | None = option(
        None, help='Batch: `latest` (the default), or JSON: `{"queue": "entry-id"}`; that entry is the last one read.'
    )
    starting_timestamp: str | None = option(
        None, help="Start at entries of this time: ISO (`2026-11-18T10:00:00Z`) or epoch milliseconds."
    )
    ending_timestamp: str | None = option(None, help="Batch: stop before entries of this time.")
    max_jobs_per_trigger: int | None = option(
        None,
        min=1,
        help="Most rows of a micro-batch, shared so that no queue is starved. In `consume` 100000 if unset.",
    )
    max_bytes_per_trigger: int | None = option(None, min=1, help="About the most bytes of a micro-batch.")
    min_partitions: int | None = option(
        None, min=1, max=100_000, help="Split into at least so many partitions; the number of cores if unset."
    )
    jobs_per_partition: int | None = option(None, min=1, help="Split so that no partition has more rows than this.")
    fail_on_data_loss: bool = option(
        True, help="Fail when entries vanished that the query had yet to read; false: warn and go on."
    )
    payload_schema: str | None = option(
        None, help="DDL of the payload, such as `to STRING, n INT`: decodes it into a struct. Unset: binary."
    )
    bad_jobs: str | None = option(
        None,
        choices=("fail", "null", "dlq"),
        help="Entries that are no jobs, or do not fit `payloadSchema`: fail the query, read as a row whose payload is "
        "null and whose `error` says why (the default in `observe`), or move to the dead letters (that of `consume`).",
    )
    filter_pushdown: bool = option(
        False,
        help="Batch: let filters on `queue`, `entry_id` and `enqueued_at` narrow what is read. Needs "
        "`spark.sql.python.filterPushdown.enabled=true`.",
    )
    consumer: str = option("", help="`consume`: a name for people, shown in logs and in the lease.")
    ack: str = option(
        "commit",
        choices=("commit", "settle"),
        help="`consume`: jobs are done when Spark has committed their batch, or as the outcome sink says.",
    )
    leftover: str = option(
        "retry",
        choices=("retry", "ok", "release"),
        help="`ack=settle`: what becomes of jobs of a committed batch that were not settled.",
    )
    lease_ttl: int = option(
        15_000, min=1000, duration=True, help="`consume`: how long a driver that fell silent keeps its place."
    )
    max_batch_runs: int = option(
        5, min=1, help="`consume`: a batch planned more often than this is dissolved and read again in small ones."
    )
    run_promoter: bool = option(True, help="`consume`: promote delayed jobs of these queues from the driver.")
    run_scheduler: bool = option(True, help="`consume`: fire repeatable jobs of these queues from the driver.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [spell(n, "spark") for n in ("queue", "queues", "queue_pattern") if getattr(self, n) is not None]
        if len(given) != 1:
            came = f"got {' and '.join(given)}" if given else "got none"
            raise OptionError(f"exactly one of queue, queues and queuePattern is expected, {came}")
        for one, other in (("starting_offsets", "starting_timestamp"), ("ending_offsets", "ending_timestamp")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise OptionError(f"{spell(one, 'spark')} and {spell(other, 'spark')} exclude each other: give one")
        if self.mode == "consume" and self.view != "jobs":
            raise OptionError(f"mode=consume takes jobs: view expects jobs, got {self.view!r}")
        if self.mode == "observe" and self.bad_jobs == "dlq":
            raise OptionError("badJobs=dlq moves entries, and mode=observe changes nothing: use mode=consume, or null")


@dataclass(frozen=True, kw_only=True)
class SinkOptions(ConnectionOptions):
    """``df.write`` and ``df.writeStream``: rows become jobs."""

    queue: str | None = option(None, help="The queue; wins over the column `queue`. One of the two is needed.")
    name: str | None = option(None, help="Name of the jobs, where there is no column `name`.")
    max_attempts: int | None = option(
        None, min=0, max=2**32 - 1, help="Runs that each job may have, where there is no column `max_attempts`."
    )
    backoff_kind: str | None = option(
        None, choices=("fixed", "exponential"), help="The jobs' back-off; needs `backoffDelayMs`."
    )
    backoff_delay_ms: int | None = option(None, min=0, help="First wait of that back-off.")
    backoff_max_delay_ms: int | None = option(None, min=0, help="Its longest wait.")
    backoff_multiplier: float | None = option(None, help="How much longer each next wait is.")
    backoff_jitter_ms: int | None = option(None, min=0, help="Up to this much is added to each wait.")
    delay_ms: int | None = option(
        None, min=0, duration=True, help="Run the jobs so much later, counted from when they are written."
    )
    delivery: str | None = option(
        None,
        choices=("exactlyOnce", "atLeastOnce"),
        help="`exactlyOnce` (the default of streams, of `ChasquiSink` and of batches with `txnAppId` and `txnVersion`) "
        "or `atLeastOnce` (that of other batches).",
    )
    txn_app_id: str | None = option(None, help="Name of the writer, under which versions are counted.")
    txn_version: int | None = option(
        None, min=0, max=2**53, help="Batch: this write's number; one that is not higher than the last is skipped."
    )
    txn_older: str | None = option(
        None,
        choices=("fail", "skip"),
        help="A version lower than the last one: `fail` with LedgerAhead (the default of streams and of `ChasquiSink`) "
        "or `skip` it (that of other batches). An equal one is always skipped: it is there already.",
    )
    overflow: str = option(
        "block",
        choices=("block", "reject", "trim"),
        help="At the cap: wait for workers for `blockTimeout`, fail at once with QueueFull, or drop the oldest jobs.",
    )
    block_timeout: int = option(600_000, min=0, duration=True, help="How long `overflow=block` waits for room.")
    max_stream_len: int = option(1_000_000, min=1, help="How many jobs a stream may hold.")
    bad_rows: str = option(
        "fail",
        choices=("fail", "dlq", "drop"),
        help="Rows that cannot become jobs: fail the batch before anything is written, put them into the dead letters, "
        "or drop and count them.",
    )
    max_payload_bytes: int = option(1_048_576, min=1, help="Largest encoded job that is accepted.")
    max_delay_secs: int = option(30 * 24 * 3600, min=0, help="Longest delay that is accepted, in seconds; 0: any.")
    dlq_max_stream_len: int = option(100_000, min=1, help="`MAXLEN ~` of the dead letters, for `badRows=dlq`.")
    dedup_ttl: int = option(86_400_000, min=1000, duration=True, help="How long ids of the column `id` are remembered.")
    stage_ttl: int = option(
        86_400_000, min=60_000, duration=True, help="How long staged rows of a batch that was never committed are kept."
    )
    ledger_ttl: int = option(
        30 * 86_400_000, min=60_000, duration=True, help="How long the last version of a writer is remembered."
    )
    durability: str = option(
        "auto",
        choices=("auto", "fsync", "none"),
        help="`fsync`: a commit waits until the server's disk has it (WAITAOF). `auto`: where the server can.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.backoff_kind is None) != (self.backoff_delay_ms is None):
            raise OptionError("backoffKind and backoffDelayMs go together: give both or none")
        if self.txn_version is not None and self.txn_app_id is None:
            raise OptionError("txnVersion is counted per txnAppId: give both")
        if self.delivery == "atLeastOnce" and self.txn_version is not None:
            raise OptionError(
                "txnVersion numbers transactions, and delivery=atLeastOnce has none: leave one of them out"
            )
        if self.queue is not None:
            checked_queue(self.queue)
        if self.txn_app_id is not None:
            checked_app_id(self.txn_app_id)
        name_bytes(self.name or "")


@dataclass(frozen=True, kw_only=True)
class SettleOptions(Settling, ConnectionOptions):
    """``.option("settle", "true")``: rows are outcomes of jobs that `mode=consume` has read."""

    settle: bool = option(
        True, help="Rows are outcomes: `queue`, `entry_id`, `outcome`, `result`, `error`, `delay_ms`."
    )
    queue: str | None = option(None, help="The queue, where there is no column `queue`.")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(ConnectionOptions):
    """``.option("replayFrom", "dlq")``: rows are dead letters, which go back to their queues."""

    replay_from: str = option("dlq", choices=("dlq",), help="Rows are dead letters: `queue`, `entry_id`, `payload`.")
    queue: str | None = option(None, help="The queue, where there is no column `queue`.")
    max_per_second: int | None = option(None, min=1, help="Most jobs put back per second, over all tasks together.")
    max_stream_len: int = option(1_000_000, min=1, help="How many jobs the stream may hold.")
    overflow: str = option("block", choices=("block", "reject"), help="At the cap: wait for workers, or fail at once.")
    block_timeout: int = option(600_000, min=0, duration=True, help="How long `overflow=block` waits for room.")
    max_payload_bytes: int = option(1_048_576, min=1, help="Largest encoded job that is accepted.")


def source_options(given: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
    """The options of a read; what fits only batches or only streams is refused once that is known."""
    options = resolved(SourceOptions, given)
    if streaming and options.view not in STREAMED_VIEWS:
        raise OptionError(
            f"view {options.view} can be read by spark.read only; streams read {', '.join(STREAMED_VIEWS)}"
        )
    if streaming:
        for name in ("ending_offsets", "ending_timestamp"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"{spell(name, 'spark')} ends a batch read; a stream goes on: use trigger(availableNow=True)"
                )
    if streaming is False and options.mode == "consume":
        raise OptionError("mode=consume works with spark.readStream; for one pass use trigger(availableNow=True)")
    return options


def writes_of(given: Mapping[str, str]) -> SinkOptions | SettleOptions | ReplayOptions:
    """The options of a write, of the kind that was asked for."""
    folded = {key.lower(): value for key, value in given.items()}
    if "replayfrom" in folded:
        return resolved(ReplayOptions, given)
    if folded.get("settle", "false").strip().lower() not in ("false", "0", "no", "off"):
        return resolved(SettleOptions, given)
    return resolved(SinkOptions, {key: value for key, value in given.items() if key.lower() != "settle"})


def resolved(cls: type[T], given: Mapping[str, Any]) -> T:
    """Make the options, with the url settled here and now: executors may have another environment."""
    kept = {key: value for key, value in given.items() if key.lower() not in _SPARKS_OWN}
    options = build(cls, kept, spelling="spark")
    url = options.url or os.environ.get("CHASQUI_URL") or "redis://127.0.0.1:6379/0"
    if parse_url(url).kind == "embedded":
        raise OptionError(
            "url embedded:// would start a server in every planning process: start one in your program with "
            "chasqui.embedded.start() and pass its url"
        )
    return replace(options, url=url)


def connection_of(options: ConnectionOptions) -> ConnectionOptions:
    """Only what is needed to connect: equal for all queries to one server, so that they share connections."""
    return ConnectionOptions(**{f.name: getattr(options, f.name) for f in fields(ConnectionOptions)})


def server_of(url: str | None) -> ConnectionOptions:
    """How to reach the server at that url, or the one of the environment."""
    return resolved(ConnectionOptions, {} if url is None else {"url": url})
