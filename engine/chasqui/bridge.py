"""What connectors build on: the engine's second public surface.

`chasqui` itself is for programs that add jobs and work on them. This module is for programs that carry jobs between a
queue and another system, such as the Spark connector: options in the house style, and bounded, blocking calls over
many queues. Names here change with the same care as those of `chasqui`.
"""

from __future__ import annotations

from chasqui.address import Address
from chasqui.address import parse as parse_url
from chasqui.options import ConnectionOptions, Settling, build, check, option, spell, table
from chasqui.protocol.columns import JobColumns, delayed_columns, job_columns
from chasqui.protocol.events import parse as parse_event
from chasqui.protocol.keys import checked_queue
from chasqui.protocol.reading import (
    PendingEntry,
    Position,
    Sample,
    Walk,
    WrongKeyType,
    id_parts,
    id_text,
    predecessor,
)
from chasqui.protocol.replies import fields as entry_fields
from chasqui.reader import Reader

__all__ = [
    "Address",
    "ConnectionOptions",
    "JobColumns",
    "PendingEntry",
    "Position",
    "Reader",
    "Sample",
    "Settling",
    "Walk",
    "WrongKeyType",
    "build",
    "check",
    "checked_queue",
    "delayed_columns",
    "entry_fields",
    "id_parts",
    "id_text",
    "job_columns",
    "option",
    "parse_event",
    "parse_url",
    "predecessor",
    "spell",
    "table",
]
