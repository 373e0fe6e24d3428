"""What stands in a queue, seen from outside with a plain client; and dead letters, put there as a worker would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import redis

from chasqui import RetryOverride
from chasqui.protocol.codec import Envelope, decode_envelope, encode_envelope, split_member


@dataclass(frozen=True)
class Seen:
    """A job as it is stored. ``at`` is its run-at, where it is delayed."""

    id: str
    name: str
    payload: Any
    created_at_ms: int
    attempt: int
    retry: RetryOverride | None
    at: int | None = None


def key(queue: str, rest: str) -> str:
    return f"{{chasqui:{queue}}}:{rest}"


def in_stream(client: redis.Redis, queue: str) -> list[Seen]:
    """The jobs of the stream in order; each entry must hold ``d`` and, unless it is empty, ``n``, and nothing else."""
    found = []
    for _, fields in client.xrange(key(queue, "stream")):
        assert list(fields) in ([b"d"], [b"d", b"n"])
        assert fields.get(b"n") != b""
        found.append(_seen(fields[b"d"], fields.get(b"n", b"")))
    return found


def in_delayed(client: redis.Redis, queue: str) -> list[Seen]:
    """The delayed jobs, the next one first."""
    entries = client.zrange(key(queue, "delayed"), 0, -1, withscores=True)
    return [_seen(envelope, name, int(at)) for member, at in entries for name, envelope in [split_member(member)]]


def ids(jobs: list[Seen]) -> list[str]:
    return [job.id for job in jobs]


def payloads(jobs: list[Seen]) -> list[Any]:
    return [job.payload for job in jobs]


def keys_of(client: redis.Redis, queue: str) -> list[str]:
    """All keys that the queue has."""
    return sorted(found.decode() for found in client.scan_iter(match=key(queue, "*"), count=1000))


def put_dead_letter(client: redis.Redis, queue: str, data: bytes | Any, **fields: str) -> str:
    """A dead letter with those bytes, or with a job of that payload, and those fields beside it; returns its id."""
    if not isinstance(data, bytes):
        data = an_envelope(f"job-{data}", data, attempt=3)
    given = {"source_id": "5-0", "reason": "retries_exhausted"} | fields
    return str(client.xadd(key(queue, "dlq"), {"d": data, **given}).decode())


def an_envelope(id: str, payload: Any, *, attempt: int = 0, retry: RetryOverride | None = None) -> bytes:
    return encode_envelope(Envelope(id, msgpack.packb(payload), 1794978620538, attempt, retry))


def _seen(envelope: bytes, name: bytes, at: int | None = None) -> Seen:
    job = decode_envelope(envelope)
    payload = msgpack.unpackb(job.payload, strict_map_key=False, timestamp=3)
    return Seen(job.id, name.decode(), payload, job.created_at_ms, job.attempt, job.retry, at)
