"""Raw replies -> values. Odd data gives an odd value, or ``DecodeError``: never another exception in a loop."""

from __future__ import annotations

from typing import Any

import hiredis

from chasqui.errors import DecodeError
from chasqui.job import U64_MAX, DlqEntry, Job
from chasqui.payload import PayloadCodec
from chasqui.protocol.codec import decode_envelope, decode_name
from chasqui.protocol.flow import Refusal


def parsed(data: bytes) -> Any:
    """The reply that these bytes are."""
    reader = hiredis.Reader()
    reader.feed(data)
    return reader.gets()


def fields(flat: Any) -> dict[bytes, bytes]:
    """A stream entry's fields; of a repeated one the first counts."""
    found: dict[bytes, bytes] = {}
    if isinstance(flat, list):
        for i in range(0, len(flat) - 1, 2):
            found.setdefault(flat[i], flat[i + 1])
    return found


def plain(raw: Any) -> str:
    """Text for people: whatever came, made readable."""
    return raw.decode(errors="replace") if isinstance(raw, bytes) else "" if raw is None else str(raw)


def number(reply: Any) -> int:
    """An integer reply, or one that is stored as text. An error reply and nil count as 0; ``DecodeError`` for text
    that is no number.
    """
    if reply is None or isinstance(reply, Refusal):
        return 0
    try:
        return int(reply)
    except ValueError:
        raise DecodeError(f"expected a whole number, found {plain(reply)!r:.80}") from None


def entry_ms(entry_id: bytes | str) -> int:
    """The millisecond part of a stream entry's id."""
    return int(plain(entry_id).partition("-")[0])


def score_ms(score: Any) -> int:
    """A score as a time: whole, not before 1970, and not without end."""
    return int(min(max(float(score), 0.0), float(U64_MAX)))


def job(data: bytes, name: bytes | None, entry_id: str, codec: PayloadCodec) -> Job:
    """The job in those bytes, or ``DecodeError``."""
    envelope = decode_envelope(data)
    return Job(
        id=envelope.id,
        name=decode_name(name),
        payload=codec.unpack(envelope.payload),
        created_at_ms=envelope.created_at_ms,
        attempt=envelope.attempt,
        retry=envelope.retry,
        entry_id=entry_id,
    )


def dlq_entry(entry: Any, codec: PayloadCodec) -> DlqEntry:
    """A dead letter; ``job`` is None where its bytes are no job."""
    found = fields(entry[1])
    source_id = plain(found.get(b"source_id"))
    data = found.get(b"d", b"")
    detail, error = found.get(b"detail"), found.get(b"error")
    try:
        decoded = job(data, found.get(b"n"), source_id, codec)
    except DecodeError:
        decoded = None
    return DlqEntry(
        dlq_id=plain(entry[0]),
        source_id=source_id,
        reason=plain(found.get(b"reason")),
        detail=None if detail is None else plain(detail),
        payload=data,
        name=decode_name(found.get(b"n")),
        job=decoded,
        error=None if error is None else plain(error),
    )
