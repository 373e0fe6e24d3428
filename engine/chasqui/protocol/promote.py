"""One pass of the promoter: due delayed jobs -> stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chasqui.errors import DecodeError
from chasqui.protocol.codec import decode_envelope
from chasqui.protocol.flow import Command, Flow, call_script
from chasqui.protocol.keys import Keys
from chasqui.protocol.lease import Lease
from chasqui.protocol.produce import Room
from chasqui.protocol.replies import number
from chasqui.protocol.scripts import script


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a pass did: members handled, jobs moved, how many are left and how overdue the oldest is.

    ``ids`` are those of the jobs moved: of all where events want them, else of those that may have an index entry for
    cancelling. An id that was made and not given has 26 letters, and none; a given one of that length keeps its entry
    until it expires, which harms nobody.
    """

    handled: int
    moved: int
    left: int
    lag_ms: int
    ids: Sequence[str]


def promote_due(
    keys: Keys, lease: Lease, room: Room, batch: int, dlq_len: int, *, all_ids: bool
) -> Flow[Promotion | None]:
    """Move one batch; None when another leads. Sent again after a lost reply: what was moved is no longer there."""
    reply = yield from call_script(
        script("promote_due"),
        [keys.delayed, keys.stream, lease.key, keys.dlq],
        [lease.holder, lease.ttl_ms, batch, room.cap, room.trim, dlq_len, int(all_ids)],
        safe=True,
    )
    if number(reply[0]) < 0:
        return None
    handled, moved, left, lag_ms = map(number, reply[:4])
    return Promotion(handled, moved, left, lag_ms, _ids(reply[4]))


def _ids(envelopes: Sequence[bytes]) -> list[str]:
    """What is no job is left to the worker that reads it."""
    found = []
    for envelope in envelopes:
        try:
            found.append(decode_envelope(envelope).id)
        except DecodeError:
            continue
    return found


def forget_index(keys: Keys, ids: Sequence[str]) -> Flow[None]:
    """Remove the index entries for cancelling of promoted jobs.

    Killed before it, they stay until they expire, and a cancel that finds one finds no member: False, as it should be.
    """
    yield Command(("UNLINK", *map(keys.delayed_index, ids)), safe=True)
