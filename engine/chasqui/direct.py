"""Adding encoded jobs at once, at least once: the way of writers that need no transaction."""

from __future__ import annotations

import logging

from chasqui.errors import BulkInterrupted, ConnectionLost
from chasqui.options import ConnectionOptions
from chasqui.protocol import produce
from chasqui.protocol.blocks import Dead, Jobs
from chasqui.protocol.bulk import Bulk
from chasqui.protocol.codec import encode_member
from chasqui.protocol.flow import Batch, Command, Flow, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.produce import Room, UniqueJob
from chasqui.redis_io import Link

log = logging.getLogger("chasqui.direct")


class DirectWriter:
    """Adds jobs of many queues. After a lost connection what was not confirmed is added again, so a job may be there
    twice, never not at all; those with an id of their own are there once.
    """

    def __init__(self, options: ConnectionOptions, room: Room, *, dlq_max_stream_len: int) -> None:
        self._options = options
        self._room = room
        self._dlq_len = dlq_max_stream_len
        self._link = Link(options)

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def add(self, queue: str, jobs: Jobs) -> None:
        """Add jobs; when it returns they are in the server."""
        keys = Keys(queue)
        if jobs.marker_ttls_s is not None:
            self._link.run(produce.add_unique(keys, self._room, _unique(jobs)))
            return
        now, later = jobs.split_by_time()
        for part, target in ((now, keys.stream), (later, keys.delayed)):
            if len(part):
                self._add_all(keys, target, part)

    def add_dead(self, queue: str, letter: Dead) -> None:
        """Add a dead letter."""
        fields: list[bytes | str] = ["d", letter.envelope]
        fields += ["n", letter.name] if letter.name else []
        fields += ["source_id", "", "reason", letter.reason, "detail", letter.detail]
        step = Command(("XADD", Keys(queue).dlq, "MAXLEN", "~", self._dlq_len, "*", *fields), safe=True)

        def flow() -> Flow[None]:
            values((yield Batch((step,))))

        self._link.run(flow())

    def _add_all(self, keys: Keys, target: str, jobs: Jobs) -> None:
        attempts = self._options.reconnect_attempts
        for attempt in range(attempts + 1):
            bulk = Bulk(
                target,
                jobs.created_at_ms,
                jobs.ids,
                jobs.payloads,
                jobs.each_name(),
                jobs.each_retry(),
                None if target == keys.stream else [at or 0 for at in jobs.run_at_ms or ()],
                self._room.trim,
            )
            try:
                self._link.run(produce.add_bulk(keys, self._room, bulk, attempts))
                return
            except BulkInterrupted as broken:
                # Only a lost connection leaves jobs of which nobody knows; anything else is the user's to hear.
                if attempt == attempts or not isinstance(broken.__cause__, ConnectionLost):
                    raise
                log.info("queue %s: %s; adding the rest again", keys.queue, broken.message)
                added = set(broken.added)
                jobs = jobs.where([i for i, job_id in enumerate(jobs.ids) if job_id not in added])


def _unique(jobs: Jobs) -> list[UniqueJob]:
    found = []
    ttls = jobs.marker_ttls_s or ()
    times = jobs.run_at_ms or [None] * len(jobs)
    for job_id, envelope, name, at, ttl in zip(jobs.ids, jobs.envelopes(), jobs.each_name(), times, ttls, strict=True):
        data = envelope if at is None else encode_member(name, envelope)
        found.append(UniqueJob(job_id, data, name, ttl or produce.OWN_MARKER_TTL_S, at))
    return found
