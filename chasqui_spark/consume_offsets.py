"""Offsets of ``mode=consume``: which batches a checkpoint has come to. Pure.

Entry ids would not do: a job that was taken over from a dead worker is older than the last one read. So the offset
holds the checkpoint's own ``sid`` and, for each queue, the number of its last batch; what belongs to a batch stands in
the manifest on the server. The same offset is always the same text, because Spark compares texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chasqui import DecodeError
from chasqui.bridge import checked_queue

VERSION = 1
_SID = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ConsumeOffset:
    """``sid`` is None before the first batch."""

    sid: str | None = None
    seq: Mapping[str, int] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        return {"seq": dict(sorted(self.seq.items())), "sid": self.sid, "v": VERSION}


def parse(offset: Any) -> ConsumeOffset:
    """The offset as Spark hands it back, or ``DecodeError``."""
    try:
        version, sid, seq = offset["v"], offset["sid"], offset["seq"]
        if version != VERSION:
            raise DecodeError(
                f"the checkpoint's offset has version {version!r:.20}, this release reads {VERSION}: use the release "
                f"that wrote it, or another checkpointLocation"
            )
        if sid is not None and not _SID.fullmatch(sid):
            raise ValueError
        found = {checked_queue(queue): int(number) for queue, number in seq.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(
            f"the checkpoint belongs to another query: {json.dumps(offset)[:200]} is no offset of mode=consume; "
            f"use another checkpointLocation"
        ) from None
    return ConsumeOffset(sid, found)


def is_ours(text: str | None) -> ConsumeOffset | None:
    """The offset in a query's progress, where it is one of ``mode=consume``; its sid is None before the first batch."""
    try:
        found = json.loads(text or "null")
        return parse(found) if isinstance(found, dict) and "sid" in found else None
    except (ValueError, DecodeError):
        return None


def batches(start: ConsumeOffset, end: ConsumeOffset) -> list[tuple[str, int]]:
    """The batches between two offsets: queue and number of each."""
    if start.sid is not None and start.sid != end.sid:
        raise DecodeError("the offsets of this checkpoint belong to two queries: use another checkpointLocation")
    return [(queue, number) for queue, number in sorted(end.seq.items()) if start.seq.get(queue) != number]
