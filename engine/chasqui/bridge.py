"""What connectors build on: the engine's second public surface.

`chasqui` itself is for programs that add jobs and work on them. This module is for programs that carry jobs between a
queue and another system, such as the Spark connector: options in the house style, and bounded, blocking calls over
many queues. Names here change with the same care as those of `chasqui`.
"""

from __future__ import annotations

from chasqui.address import Address
from chasqui.address import parse as parse_url
from chasqui.batch_jobs import BatchJobs, Piece
from chasqui.claims import Claims, Planned, SettleTerms, tell_ended
from chasqui.claims import settle as settle_batch
from chasqui.direct import DirectWriter
from chasqui.handlers import MAX_ERROR_BYTES, BatchHandler, describe, is_async, is_unrecoverable, reason_of
from chasqui.handlers import outcomes as batch_outcomes
from chasqui.ids import new_ids
from chasqui.intake import Limits, classify
from chasqui.loading import load_handler
from chasqui.options import ConnectionOptions, Settling, build, check, option, option_duration, spell, table
from chasqui.outcomes import FAIL, OK, RETRY, Outcome, Outcomes, Settled
from chasqui.payload import PayloadCodec
from chasqui.protocol.blocks import Dead, Jobs, packed_retry
from chasqui.protocol.columns import JobColumns, JobSpans, delayed_columns, job_columns
from chasqui.protocol.consume import DeadLetter
from chasqui.protocol.events import parse as parse_event
from chasqui.protocol.keys import checked_app_id, checked_queue, id_bytes, name_bytes
from chasqui.protocol.produce import Room, marker_ttl_s
from chasqui.protocol.reading import (
    PendingEntry,
    Position,
    Sample,
    Walk,
    id_parts,
    id_text,
    matches,
    predecessor,
    successor,
)
from chasqui.protocol.replies import fields as entry_fields
from chasqui.protocol.transact import Home, LedgerRow
from chasqui.reader import Reader
from chasqui.redis_io import Link
from chasqui.replays import Pace, Repaired, Replays
from chasqui.settings import add_arguments, collect, read_file
from chasqui.staging import Staged, Stager
from chasqui.standing import Standing
from chasqui.transactions import Ledger, Terms, Transactions
from chasqui.verdicts import asked_ms

__all__ = [
    "FAIL",
    "MAX_ERROR_BYTES",
    "OK",
    "RETRY",
    "Address",
    "BatchHandler",
    "BatchJobs",
    "Claims",
    "ConnectionOptions",
    "Dead",
    "DeadLetter",
    "DirectWriter",
    "Home",
    "JobColumns",
    "JobSpans",
    "Jobs",
    "Ledger",
    "LedgerRow",
    "Limits",
    "Link",
    "Outcome",
    "Outcomes",
    "Pace",
    "PayloadCodec",
    "PendingEntry",
    "Piece",
    "Planned",
    "Position",
    "Reader",
    "Repaired",
    "Replays",
    "Room",
    "Sample",
    "SettleTerms",
    "Settled",
    "Settling",
    "Staged",
    "Stager",
    "Standing",
    "Terms",
    "Transactions",
    "Walk",
    "add_arguments",
    "asked_ms",
    "batch_outcomes",
    "build",
    "check",
    "checked_app_id",
    "checked_queue",
    "classify",
    "collect",
    "delayed_columns",
    "describe",
    "entry_fields",
    "id_bytes",
    "id_parts",
    "id_text",
    "is_async",
    "is_unrecoverable",
    "job_columns",
    "load_handler",
    "marker_ttl_s",
    "matches",
    "name_bytes",
    "new_ids",
    "option",
    "option_duration",
    "packed_retry",
    "parse_event",
    "parse_url",
    "predecessor",
    "read_file",
    "reason_of",
    "settle_batch",
    "spell",
    "successor",
    "table",
    "tell_ended",
]
