"""Values -> text for people and JSON for programs. Pure and total: what came from a server is data, never control.

Text is made printable, so that no payload, name or error can move a terminal's cursor. JSON keeps everything that
MessagePack can hold; what JSON has no word for stands in an object of one key that starts with ``$``.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgpack

MAX_DEPTH = 100
_BARS = "▁▂▃▄▅▆▇█"
_SCALE = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"))
_LATEST_MS = 253_402_300_799_999  # the last moment of the year 9999, which is as far as datetime goes


def printable(text: Any, limit: int | None = None) -> str:
    """On one line, without control characters; cut with an ellipsis."""
    whole = str(text) if limit is None else str(text)[: limit + 1]
    out = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in whole)
    return out if limit is None or len(out) <= limit else out[: max(0, limit - 1)] + "…"


def jsonable(value: Any, depth: int = 0) -> Any:
    """The value as JSON can hold it."""
    if depth > MAX_DEPTH:
        return {"$deep": "nested deeper than is shown"}
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, msgpack.ExtType):
        return {"$ext": value.code, "data": base64.b64encode(value.data).decode()}
    if isinstance(value, msgpack.Timestamp):
        return {"$timestamp": [value.seconds, value.nanoseconds]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {jsonable(key): jsonable(inner, depth + 1) for key, inner in value.items()}
        return {"$map": [[jsonable(key, depth + 1), jsonable(inner, depth + 1)] for key, inner in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(inner, depth + 1) for inner in value]
    return str(value)


def as_json(value: Any, *, ascii: bool = False) -> str:
    """One line of JSON, keys in the order given."""
    return json.dumps(jsonable(value), ensure_ascii=ascii, allow_nan=False)


def payload(value: Any, limit: int = 60) -> str:
    """A payload in short, for a column."""
    return printable(as_json(value), limit)


def age(ms: float) -> str:
    """A duration in its two largest units."""
    if ms < 1000:
        return f"{int(ms)} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    parts: list[str] = []
    left = int(ms)
    for size, unit in _SCALE:
        if left >= size or parts:
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join(parts[:2])


def moment(ms: int) -> str:
    """A time, in UTC."""
    if not 0 <= ms <= _LATEST_MS:
        return f"{ms} ms"
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def count(number: float | None) -> str:
    """A number with thousands told apart; a dash for what is not known."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def many(number: int, noun: str) -> str:
    """So many of them: `1 job`, `2,000 jobs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def spark_line(values: Sequence[float | None], width: int) -> str:
    """The last values as bars, the highest of them a full one; unknown ones leave a gap."""
    chosen = list(values)[-width:]
    top = max((v for v in chosen if v is not None), default=0)
    if top <= 0:
        return "".join(" " if v is None else _BARS[0] for v in chosen).rjust(width)
    bars = (" " if v is None else _BARS[min(7, math.ceil(max(v, 0) / top * 7))] for v in chosen)
    return "".join(bars).rjust(width)
