"""Everything that can be told about a queue in one round trip, for people who look at it."""

from __future__ import annotations

from typing import Any

from chasqui.job import Overview, WorkerSeen
from chasqui.protocol.flow import Batch, Flow, Refusal, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import entry_ms, fields, number, plain, score_ms


def overview(keys: Keys, group: str) -> Flow[Overview]:
    """Lengths, ages, workers and leaders of a queue at one moment, by the server's clock."""
    replies = yield Batch(
        (
            command("XINFO", "STREAM", keys.stream, safe=True),
            command("XPENDING", keys.stream, group, safe=True),
            command("XINFO", "CONSUMERS", keys.stream, group, safe=True),
            command("XINFO", "STREAM", keys.dlq, safe=True),
            command("XLEN", keys.events, safe=True),
            command("ZCARD", keys.delayed, safe=True),
            command("ZRANGE", keys.delayed, 0, 0, "WITHSCORES", safe=True),
            command("ZCARD", keys.repeat, safe=True),
            command("GET", keys.promoter_lock, safe=True),
            command("GET", keys.scheduler_lock, safe=True),
            command("EXISTS", keys.paused, safe=True),
            command("TIME", safe=True),
        )
    )
    has_group = not isinstance(replies[1], Refusal)
    # A missing key or group is an answer here; NOPERM, WRONGTYPE and the like are not.
    for i in range(4):
        if isinstance(replies[i], Refusal) and _is_absence(replies[i]):
            replies[i] = []
    stream, summary, consumers, dlq, events, delayed, first, repeatable, promoter, scheduler, paused, clock = values(
        replies
    )
    about, about_dlq = fields(stream), fields(dlq)
    length, pending = number(about.get(b"length")), number(summary[0]) if summary else 0
    oldest: Any = about.get(b"first-entry")
    now_ms = number(clock[0]) * 1000 + number(clock[1]) // 1000
    due_ms = score_ms(first[1]) if first else None
    return Overview(
        queue=keys.queue,
        group=group,
        group_exists=has_group,
        length=length,
        waiting=max(0, length - pending),
        pending=pending,
        delayed=number(delayed),
        dlq=number(about_dlq.get(b"length")),
        events=number(events),
        repeatable=number(repeatable),
        oldest_age_ms=max(0, now_ms - entry_ms(oldest[0])) if oldest else 0,
        next_due_ms=due_ms,
        delayed_lag_ms=max(0, now_ms - due_ms) if due_ms is not None else 0,
        paused=bool(number(paused)),
        promoter=None if promoter is None else plain(promoter),
        scheduler=None if scheduler is None else plain(scheduler),
        added=_counter(about),
        dead=_counter(about_dlq),
        workers=[_worker(fields(consumer)) for consumer in consumers],
        now_ms=now_ms,
    )


def _is_absence(refusal: Refusal) -> bool:
    return refusal.code == "NOGROUP" or (refusal.code == "ERR" and "no such key" in refusal.text)


def _counter(about: dict[bytes, Any]) -> int | None:
    """How many entries a stream has ever had; Redis before 7.0 does not count them, and one that is not there has 0."""
    if not about:
        return 0
    found = about.get(b"entries-added")
    return None if found is None else number(found)


def _worker(about: dict[bytes, Any]) -> WorkerSeen:
    return WorkerSeen(plain(about.get(b"name")), number(about.get(b"pending")), number(about.get(b"idle")))
