"""Stored repeat specs: bytes <-> values.

``[key, job_name, pattern, payload, limit, start_after_ms, end_before_ms, fired, missed_fires?, retry?]``. ``payload``
is a ``bin`` that holds the payload element of the envelopes to come, for our kind of payload a ``bin`` again.
The two DST policies have no place in this array; they stand in a hash field of their own, which others ignore.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from chasqui.errors import ConfigError, DecodeError
from chasqui.job import RetryOverride
from chasqui.protocol.codec import (
    check_msgpack,
    decode_retry,
    optional_uint,
    parts,
    retry_fields,
    text,
)
from chasqui.repeat import MissedFires, RepeatPattern

_FIELDS = (
    "key",
    "job_name",
    "pattern",
    "payload",
    "limit",
    "start_after_ms",
    "end_before_ms",
    "fired",
    "missed_fires",
    "retry",
)
_MISSED = {b"Skip": "skip", b"FireOnce": "fire_once", b"FireAll": "fire_all"}


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A spec as it lies in the server. ``element`` is the payload element of the envelopes it fires."""

    key: str
    job_name: str
    pattern: RepeatPattern
    element: bytes
    limit: int | None
    start_after_ms: int | None
    end_before_ms: int | None
    missed_fires: MissedFires
    retry: RetryOverride | None


def encode_spec(spec: StoredSpec) -> bytes:
    """The bytes that ChasquiMQ writes for the same spec; the policy is left out where it is to skip."""
    pattern: dict[str, Any]
    if spec.pattern.expression is None:
        pattern = {"Every": [spec.pattern.interval_ms]}
    else:
        pattern = {"Cron": [spec.pattern.expression, spec.pattern.tz]}
    fields: list[Any] = [
        spec.key,
        spec.job_name,
        pattern,
        spec.element,
        spec.limit,
        spec.start_after_ms,
        spec.end_before_ms,
        0,
    ]
    missed = spec.missed_fires
    if missed.kind == "fire_once":
        fields.append("FireOnce")
    elif missed.kind == "fire_all":
        fields.append({"FireAll": [missed.max_catchup]})
    elif spec.retry is not None:
        fields.append("Skip")
    if spec.retry is not None:
        fields.append(retry_fields(spec.retry))
    return bytes(msgpack.packb(fields, use_bin_type=True))


def decode_spec(data: bytes, *, gap: str = "shift", overlap: str = "first") -> StoredSpec:
    """Read a stored spec of 8, 9 or 10 elements, or written as a map."""
    found = parts(data, _FIELDS)
    missing = [name for name in _FIELDS[:4] if name not in found]
    if missing:
        raise DecodeError(f"the repeat spec has no {', '.join(missing)}")
    try:
        return StoredSpec(
            key=text("key", found["key"]),
            job_name=text("job_name", found["job_name"]),
            pattern=_pattern(found["pattern"], gap, overlap),
            element=_element(found["payload"]),
            limit=optional_uint("limit", found.get("limit")),
            start_after_ms=optional_uint("start_after_ms", found.get("start_after_ms")),
            end_before_ms=optional_uint("end_before_ms", found.get("end_before_ms")),
            missed_fires=_missed_fires(found.get("missed_fires")),
            retry=decode_retry(found["retry"]) if "retry" in found else None,
        )
    except ConfigError as error:  # well formed, but outside of what the values allow
        raise DecodeError(error.message) from None


def payload_element(payload: bytes) -> bytes:
    """The payload as it stands in an envelope: MessagePack inside a ``bin``."""
    return bytes(msgpack.packb(payload, use_bin_type=True))


def _tagged(what: str, raw: bytes) -> tuple[bytes, list[Any]]:
    """An enum: its name alone, or a map of one name to its fields."""
    try:
        value = msgpack.unpackb(raw, raw=True, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        raise DecodeError(f"{what} is not MessagePack") from None
    if isinstance(value, bytes):
        return value, []
    if isinstance(value, dict) and len(value) == 1:
        ((name, inner),) = value.items()
        if isinstance(name, bytes):
            return name, _fields_of(inner)
    raise DecodeError(f"{what} expects a name, or a map of one name to its fields")


def _fields_of(inner: Any) -> list[Any]:
    if isinstance(inner, list):
        return inner
    if isinstance(inner, dict):  # struct variants by name: in the order in which they are declared
        order = (b"interval_ms", b"expression", b"tz", b"max_catchup")
        return [inner[name] for name in order if name in inner]
    return [] if inner is None else [inner]


def _pattern(raw: bytes, gap: str, overlap: str) -> RepeatPattern:
    name, fields = _tagged("pattern", raw)
    if name == b"Every" and len(fields) == 1 and type(fields[0]) is int:
        return RepeatPattern.every(fields[0])
    if name == b"Cron" and len(fields) in (1, 2) and isinstance(fields[0], bytes):
        zone = fields[1] if len(fields) == 2 else None
        if zone is None or isinstance(zone, bytes):
            try:
                expression, tz = fields[0].decode(), None if zone is None else zone.decode()
            except UnicodeDecodeError:
                raise DecodeError("the cron expression or zone is not UTF-8") from None
            return RepeatPattern.cron(expression, tz, gap=gap, overlap=overlap)
    raise DecodeError("pattern expects Every [interval_ms] or Cron [expression, tz]")


def _missed_fires(raw: bytes | None) -> MissedFires:
    if raw is None or raw == b"\xc0":
        return MissedFires.skip()
    name, fields = _tagged("missed_fires", raw)
    kind = _MISSED.get(name)
    if kind == "fire_all" and len(fields) == 1 and type(fields[0]) is int:
        return MissedFires.fire_all(fields[0])
    if kind in ("skip", "fire_once") and not fields:
        return MissedFires(kind)
    raise DecodeError("missed_fires expects Skip, FireOnce or FireAll [max_catchup]")


def _element(raw: bytes) -> bytes:
    if raw[0] not in (0xC4, 0xC5, 0xC6):
        raise DecodeError("payload expects bin")
    element: bytes = msgpack.unpackb(raw, max_bin_len=len(raw))
    if not element:
        raise DecodeError("payload is empty")
    check_msgpack(element)
    return element
