"""What to do with an entry as it arrives: a job to run, or a dead letter. Pure; nothing here raises on data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chasqui.errors import DecodeError
from chasqui.job import Job, RetryOverride
from chasqui.protocol.codec import Envelope, decode_fields, decode_name
from chasqui.protocol.consume import DeadLetter, Entry
from chasqui.protocol.replies import fields


@dataclass(slots=True)
class ActiveJob(Job):
    """A job in a worker's hands. ``payload`` is decoded just before its handler runs.

    ``lost`` tells that another worker has taken it over: what becomes of it here no longer counts.
    """

    entry: bytes = field(default=b"", repr=False)
    packed: bytes = field(default=b"", repr=False)
    inline: bool = field(default=False, repr=False)
    name_bytes: bytes = field(default=b"", repr=False)
    deliveries: int = field(default=0, repr=False)
    owner: Any = field(default=None, repr=False, compare=False)
    lost: bool = False

    @property
    def envelope(self) -> Envelope:
        """What the job was read from, to be written again."""
        return Envelope(self.id, self.packed, self.created_at_ms, self.attempt, self.retry, self.inline)

    def extend(self) -> Any:
        """Renew the claim now. Claims are renewed by themselves while a handler runs; this asks whether it still holds.

        True while the job is ours. To be awaited in coroutines; in handlers that run in threads it blocks.
        """
        return self.owner.extend(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker accepts."""

    max_attempts: int
    max_payload_bytes: int


def classify(entry: Entry, limits: Limits, owner: Any) -> ActiveJob | DeadLetter:
    """Check an entry in the order in which ChasquiMQ does: payload there, size, envelope, budget of runs.

    An entry that was delivered before without being settled was started and its worker died: each such delivery is a
    run. So a job that kills its worker is started exactly ``max_attempts`` times. What is only beside it is saved by
    ``on_last_run``.
    """
    entry_id, flat, deliveries = entry
    if type(flat) is list and len(flat) == 4 and flat[0] == b"d" and flat[2] == b"n":
        data, name = flat[1], flat[3]
    else:
        found = fields(flat)
        data, name = found.get(b"d"), found.get(b"n", b"")
    if data is None:
        detail = "missing or non-bytes payload field" if isinstance(flat, list) else "fields not an array"
        return DeadLetter(entry_id, b"", b"", "malformed", 0, detail=detail)
    if len(data) > limits.max_payload_bytes:
        return DeadLetter(entry_id, data, name, "oversize_payload", 0)
    try:
        job_id, packed, created_at_ms, attempt, retry, inline = decode_fields(data)
    except DecodeError:
        return DeadLetter(entry_id, data, b"", "decode_failed", 0)
    prior = attempt if attempt > deliveries else deliveries
    if prior + 1 > budget(retry, limits):
        return DeadLetter(entry_id, data, name, "retries_exhausted", prior, job_id)
    return ActiveJob(
        job_id,
        decode_name(name),
        None,
        created_at_ms,
        attempt,
        retry,
        entry_id.decode(),
        entry_id,
        packed,
        inline,
        name,
        deliveries,
        owner,
    )


def on_last_run(job: ActiveJob, limits: Limits) -> bool:
    """Whether one more dead worker would be this job's end, though no handler ever refused it.

    All jobs in the hands of a worker that dies have one run less, and only one of them may have killed it. A worker
    that has at most one such job at a time tells it from its neighbours.
    """
    return 0 < job.deliveries == budget(job.retry, limits) - 1


def budget(retry: RetryOverride | None, limits: Limits) -> int:
    """How many runs the job may have; its own word goes before the worker's."""
    if retry is None or retry.max_attempts is None:
        return limits.max_attempts
    return retry.max_attempts
