"""Envelopes and delayed members: bytes <-> values. The only user of msgpack for what the engine itself writes.

Reading is total: any bytes give a value or ``DecodeError``, in time and memory bounded by their own length.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from chasqui.errors import DecodeError
from chasqui.job import U32_MAX, U64_MAX, Backoff, RetryOverride

_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack
_ENVELOPE_FIELDS = ("id", "payload", "created_at_ms", "attempt", "retry")
_RETRY_FIELDS = ("max_attempts", "backoff")
_BACKOFF_FIELDS = ("kind", "delay_ms", "max_delay_ms", "multiplier", "jitter_ms")
_NAME_LENGTH = struct.Struct("<I")
_MISSING: Any = object()


@dataclass(slots=True)
class Envelope:
    """A job's bytes, taken apart. ``payload`` is MessagePack; ``inline`` tells that it stood in the array as such,
    as Rust-native producers write it, and not inside a ``bin``: written back the same way.
    """

    id: str
    payload: bytes
    created_at_ms: int
    attempt: int
    retry: RetryOverride | None = None
    inline: bool = False

    def with_attempt(self, attempt: int) -> Envelope:
        return replace(self, attempt=attempt)


def encode_envelope(job: Envelope) -> bytes:
    """``[id, payload, created_at_ms, attempt]``, and the retry override where there is one."""
    if not job.inline:
        fields: tuple[Any, ...] = (job.id, job.payload, job.created_at_ms, job.attempt)
        if job.retry is not None:
            fields += (retry_fields(job.retry),)
        return bytes(_pack(fields))
    head = (b"\x94" if job.retry is None else b"\x95") + _pack(job.id)
    tail: bytes = _pack(job.created_at_ms) + _pack(job.attempt)
    if job.retry is not None:
        tail += _pack(retry_fields(job.retry))
    return bytes(head + job.payload + tail)


def retry_fields(retry: RetryOverride) -> list[Any]:
    """The override as it stands in the envelope: always two, the backoff always five, nil for what is not set."""
    backoff = retry.backoff
    if backoff is None:
        return [retry.max_attempts, None]
    multiplier = None if backoff.multiplier is None else float(backoff.multiplier)
    return [
        retry.max_attempts,
        [backoff.kind, backoff.delay_ms, backoff.max_delay_ms, multiplier, backoff.jitter_ms],
    ]


def decode_envelope(data: bytes) -> Envelope:
    """Read an envelope in any form that ChasquiMQ accepts, and with an inline payload."""
    return Envelope(*decode_fields(data))


def decode_fields(data: bytes) -> tuple[str, bytes, int, int, RetryOverride | None, bool]:
    """The fields of an ``Envelope``, in its order, without making one: workers read a hundred thousand a second."""
    # The common form, as every producer writes it, in one call into C; anything else takes the careful way.
    try:
        fields = msgpack.unpackb(data, strict_map_key=False)
        if type(fields) is list and len(fields) == 4:
            job_id, payload, created, attempt = fields
            if (
                type(job_id) is str
                and type(payload) is bytes
                and type(created) is int
                and type(attempt) is int
                and created >= 0
                and 0 <= attempt <= U32_MAX
            ):
                return job_id, payload, created, attempt, None, False
    except (ValueError, TypeError, RecursionError, MemoryError, OverflowError):
        pass
    return _decode_carefully(data)


def encode_member(name: bytes, envelope: bytes) -> bytes:
    """A member of the delayed set."""
    return _NAME_LENGTH.pack(len(name)) + name + envelope


def split_member(member: bytes) -> tuple[bytes, bytes]:
    """Name and envelope of a delayed member."""
    if len(member) < 4:
        raise DecodeError(f"a delayed member starts with 4 bytes of name length, this one has {len(member)} in all")
    length = _NAME_LENGTH.unpack_from(member)[0]
    if 4 + length > len(member):
        raise DecodeError(f"a delayed member says that its name has {length} bytes, but {len(member) - 4} follow")
    return member[4 : 4 + length], member[4 + length :]


def decode_name(raw: bytes | None) -> str:
    """A missing, empty or non-UTF-8 name means unnamed."""
    try:
        return raw.decode() if raw else ""
    except UnicodeDecodeError:
        return ""


def parts(data: bytes, names: tuple[str, ...]) -> dict[str, bytes]:
    """The raw MessagePack of each field of a struct that is written as an array, or as a map with names for keys.

    Spans only: nothing inside is decoded, so the payload may be anything. Trailing bytes are ignored.
    """
    try:
        return _parts(data, names)
    except DecodeError:
        raise
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not MessagePack: {type(error).__name__} {error}"[:200]) from None


def _parts(data: bytes, names: tuple[str, ...]) -> dict[str, bytes]:
    # Length limits: a header may claim four billion elements, but no more than len(data) of them can be there.
    limit = len(data)
    unpacker = msgpack.Unpacker(
        max_buffer_size=max(1, limit),
        max_str_len=limit,
        max_bin_len=limit,
        max_array_len=limit,
        max_map_len=limit,
        max_ext_len=limit,
        raw=True,
        strict_map_key=False,
    )
    unpacker.feed(data)
    first = data[0] if data else 0xC1
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        count = unpacker.read_array_header()
        if count > len(names):
            raise DecodeError(f"expected at most {len(names)} elements, found {count}")
        return {name: _span(unpacker, data) for name in names[:count]}
    if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
        found: dict[str, bytes] = {}
        for _ in range(unpacker.read_map_header()):
            key = _scalar(_span(unpacker, data))
            value = _span(unpacker, data)
            name = _field_name(key, names)
            if name is None:
                continue
            if name in found:
                raise DecodeError(f"the field {name} stands twice")
            found[name] = value
        return found
    raise DecodeError("expected an array or a map")


def _span(unpacker: Any, data: bytes) -> bytes:
    start = unpacker.tell()
    unpacker.skip()
    return data[start : unpacker.tell()]


def _field_name(key: Any, names: tuple[str, ...]) -> str | None:
    if isinstance(key, bytes):
        return next((name for name in names if name.encode() == key), None)
    if isinstance(key, int) and not isinstance(key, bool):
        return names[key] if 0 <= key < len(names) else None
    raise DecodeError("expected field names as keys")


def _scalar(raw: bytes) -> Any:
    """One value, str and bin alike as bytes; containers and extensions come as None, which no field accepts."""
    first = raw[0]
    if 0x80 <= first <= 0x9F or 0xDC <= first <= 0xDF or 0xC7 <= first <= 0xC9 or 0xD4 <= first <= 0xD8:
        return _MISSING
    return msgpack.unpackb(raw, raw=True)


def _decode_carefully(data: bytes) -> tuple[str, bytes, int, int, RetryOverride | None, bool]:
    found = parts(data, _ENVELOPE_FIELDS)
    for name in ("id", "payload", "created_at_ms"):
        if name not in found:
            raise DecodeError(f"the envelope has no {name}")
    payload, inline = _payload(found["payload"])
    return (
        text("id", found["id"]),
        payload,
        uint("created_at_ms", found["created_at_ms"]),
        uint("attempt", found["attempt"], U32_MAX) if "attempt" in found else 0,
        decode_retry(found["retry"]) if "retry" in found else None,
        inline,
    )


def _payload(raw: bytes) -> tuple[bytes, bool]:
    """The payload's MessagePack, and whether it stood inline.

    An array of numbers up to 255 is how some encoders write bytes, and ChasquiMQ reads it as such.
    """
    first = raw[0]
    if first in (0xC4, 0xC5, 0xC6):
        return bytes(msgpack.unpackb(raw, max_bin_len=len(raw))), False
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        try:
            return bytes(_byte(item) for item in msgpack.unpackb(raw, raw=True, strict_map_key=False)), False
        except (ValueError, TypeError, RecursionError):
            pass
    # Whole, or not at all: a payload that does not parse by itself would be handed on as if it did.
    check_msgpack(raw)
    return raw, True


def _byte(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("not a byte")
    return value


def check_msgpack(raw: bytes) -> None:
    """Refuse bytes that are not one whole MessagePack value."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(raw)), raw=True, strict_map_key=False)
    unpacker.feed(raw)
    try:
        unpacker.skip()
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not MessagePack: {type(error).__name__}") from None
    if unpacker.tell() != len(raw):
        raise DecodeError("bytes follow after the MessagePack value")


def text(name: str, raw: bytes) -> str:
    value = _scalar(raw)
    if not isinstance(value, bytes):
        raise DecodeError(f"{name} expects text")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise DecodeError(f"{name} is not UTF-8") from None


def uint(name: str, raw: bytes, top: int = U64_MAX) -> int:
    value = _scalar(raw)
    if type(value) is not int or not 0 <= value <= top:
        raise DecodeError(f"{name} expects a whole number from 0 to {top}")
    return value


def optional_uint(name: str, raw: bytes | None, top: int = U64_MAX) -> int | None:
    return None if raw is None or raw == b"\xc0" else uint(name, raw, top)


def decode_retry(raw: bytes) -> RetryOverride | None:
    """A retry override as array of two or as map; nil is none."""
    if raw == b"\xc0":
        return None
    found = _struct("retry", raw, _RETRY_FIELDS)
    backoff = found.get("backoff", b"\xc0")
    return RetryOverride(
        max_attempts=optional_uint("max_attempts", found.get("max_attempts"), U32_MAX),
        backoff=None if backoff == b"\xc0" else _backoff(backoff),
    )


def _backoff(raw: bytes) -> Backoff:
    found = _struct("backoff", raw, _BACKOFF_FIELDS)
    if "kind" not in found or "delay_ms" not in found:
        raise DecodeError("backoff needs kind and delay_ms")
    multiplier = _scalar(found.get("multiplier", b"\xc0"))
    if multiplier is not None and (isinstance(multiplier, bool) or not isinstance(multiplier, int | float)):
        raise DecodeError("multiplier expects a number")
    return Backoff(
        kind=_kind(found["kind"]),
        delay_ms=uint("delay_ms", found["delay_ms"]),
        max_delay_ms=optional_uint("max_delay_ms", found.get("max_delay_ms")),
        multiplier=None if multiplier is None else float(multiplier),
        jitter_ms=optional_uint("jitter_ms", found.get("jitter_ms")),
    )


def _struct(what: str, raw: bytes, names: tuple[str, ...]) -> dict[str, bytes]:
    """A nested struct: as an array it has exactly its fields, as a map any of them."""
    found = parts(raw, names)
    is_map = 0x80 <= raw[0] <= 0x8F or raw[0] in (0xDE, 0xDF)
    if not is_map and len(found) != len(names):
        raise DecodeError(f"{what} expects {len(names)} elements, found {len(found)}")
    return found


def _kind(raw: bytes) -> str:
    if raw[0] == 0x81:  # the tagged form of an enum: {"fixed": nil}
        name, nil = _map_of_one(raw)
        value = _scalar(name) if nil == b"\xc0" else None
    else:
        value = _scalar(raw)
    if type(value) is int:
        return ("fixed", "exponential", "unknown")[min(value, 2)] if value >= 0 else _no_kind()
    if not isinstance(value, bytes):
        return _no_kind()
    return {b"fixed": "fixed", b"exponential": "exponential"}.get(value, "unknown")


def _map_of_one(raw: bytes) -> tuple[bytes, bytes]:
    unpacker = msgpack.Unpacker(max_buffer_size=len(raw), raw=True, strict_map_key=False)
    unpacker.feed(raw)
    unpacker.read_map_header()
    return _span(unpacker, raw), _span(unpacker, raw)


def _no_kind() -> str:
    raise DecodeError("backoff kind expects text")
