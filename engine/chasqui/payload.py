"""Users' values <-> MessagePack, with errors that name the place of the value."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgpack

from chasqui.errors import DecodeError, PayloadError

_HINTS = {
    "Decimal": "write it as text: str(value)",
    "UUID": "write it as text: str(value)",
    "datetime": "write it as text, or set datetimes=True for MessagePack timestamps",
    "date": "write it as text: value.isoformat()",
    "set": "make it a list",
    "frozenset": "make it a list",
}


class PayloadCodec:
    """Packs and unpacks payloads and results. ``raw`` leaves bytes alone."""

    def __init__(self, *, raw: bool = False, datetimes: bool = False, max_bytes: int | None = None) -> None:
        self.raw = raw
        self.datetimes = datetimes
        self.max_bytes = max_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.raw, self.datetimes, self.max_bytes)

    def pack(self, value: Any) -> bytes:
        """The value's MessagePack."""
        if self.raw:
            if not isinstance(value, bytes | bytearray | memoryview):
                raise PayloadError(f"payload expects MessagePack bytes, because raw=True; got {type(value).__name__}")
            data = bytes(value)
        else:
            try:
                data = msgpack.packb(value, use_bin_type=True, datetime=self.datetimes)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise PayloadError(self._explain(value, error)) from None
        if self.max_bytes is not None and len(data) > self.max_bytes:
            raise too_large(len(data), self.max_bytes)
        return data

    def unpack(self, data: bytes) -> Any:
        """The value; any bytes give one, or ``DecodeError``."""
        if self.raw:
            return data
        try:
            return msgpack.unpackb(data, strict_map_key=False, timestamp=3 if self.datetimes else 0)
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise DecodeError(f"the payload is not MessagePack: {type(error).__name__} {error}"[:200]) from None
        except msgpack.exceptions.UnpackException as error:
            raise DecodeError(f"the payload is not MessagePack: {type(error).__name__}") from None

    def _explain(self, value: Any, error: Exception) -> str:
        found = _culprit(value, self.datetimes)
        if found is None:
            return "payload is nested deeper than MessagePack's writer goes, or contains itself"
        path, culprit = found
        kind = type(culprit).__name__
        if isinstance(culprit, int):
            return f"{path} is a number of more than 64 bits, which MessagePack cannot hold: write it as text"
        if isinstance(culprit, str):
            return f"{path} holds characters that UTF-8 cannot write (a lone surrogate)"
        if isinstance(culprit, datetime) and self.datetimes:
            return f"{path} is a datetime without a time zone: make it aware, e.g. replace(tzinfo=timezone.utc)"
        hint = _HINTS.get(kind, "MessagePack takes None, bool, int, float, str, bytes, list, tuple and dict")
        return f"{path} is a {kind}, which MessagePack cannot hold ({error}): {hint}"


def too_large(size: int, limit: int) -> PayloadError:
    return PayloadError(
        f"the encoded job has {size} bytes, more than max_payload_bytes ({limit}): store the data elsewhere and "
        f"enqueue a reference, or raise the limit here and in the workers"
    )


def _make(raw: bool, datetimes: bool, max_bytes: int | None) -> PayloadCodec:
    return PayloadCodec(raw=raw, datetimes=datetimes, max_bytes=max_bytes)


def _culprit(value: Any, datetimes: bool) -> tuple[str, Any] | None:
    """The path and value of the first thing that does not pack. Each container is looked into once, so a value that
    contains itself ends too; None when nothing in it is wrong but its depth.
    """
    stack: list[tuple[str, Any]] = [("payload", value)]
    seen: set[int] = set()
    while stack:
        path, item = stack.pop()
        if isinstance(item, dict | list | tuple):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, dict):
                for key, inner in reversed(item.items()):
                    stack.append((f"{path:.200}[{key!r:.40}]", inner))
                    stack.append((f"the key {key!r:.40} in {path:.200}", key))
            else:
                stack.extend((f"{path:.200}[{i}]", inner) for i, inner in reversed(list(enumerate(item))))
        else:
            try:
                msgpack.packb(item, use_bin_type=True, datetime=datetimes)
            except (TypeError, ValueError, OverflowError):
                return path, item
    return None
