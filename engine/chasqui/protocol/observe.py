"""Figures of a queue, results of jobs, pausing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chasqui.job import Stats
from chasqui.protocol.flow import Batch, Command, Flow, Refusal, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import entry_ms, number


def stats(keys: Keys, group: str) -> Flow[Stats]:
    """One round trip. A job that is being worked on still stands in the stream, so waiting = length - pending."""
    return (yield from stats_of_all([keys], group))[0]


def stats_of_all(queues: Sequence[Keys], group: str) -> Flow[list[Stats]]:
    """The same for several queues, still in one round trip."""
    replies = yield Batch(tuple(one for keys in queues for one in _figures(keys, group)))
    each = len(replies) // max(1, len(queues))
    return [_stats(replies[i : i + each]) for i in range(0, len(replies), each or 1)]


def _figures(keys: Keys, group: str) -> tuple[Command, ...]:
    return (
        command("XLEN", keys.stream, safe=True),
        command("XPENDING", keys.stream, group, safe=True),
        command("ZCARD", keys.delayed, safe=True),
        command("XLEN", keys.dlq, safe=True),
        command("XRANGE", keys.stream, "-", "+", "COUNT", 1, safe=True),
        command("TIME", safe=True),
        command("EXISTS", keys.paused, safe=True),
    )


def _stats(replies: list[Any]) -> Stats:
    if isinstance(replies[1], Refusal) and replies[1].code == "NOGROUP":
        replies[1] = [0]
    length, summary, delayed, dlq, oldest, clock, paused = values(replies)
    pending = number(summary[0])
    now_ms = number(clock[0]) * 1000 + number(clock[1]) // 1000
    return Stats(
        waiting=max(0, number(length) - pending),
        pending=pending,
        delayed=number(delayed),
        dlq=number(dlq),
        oldest_age_ms=max(0, now_ms - entry_ms(oldest[0][0])) if oldest else 0,
        paused=bool(paused),
    )


def ping() -> Flow[None]:
    """Whether the server is there and lets us in; what this user may do there is another question."""
    try:
        yield command("PING", safe=True, route="{0}")
    except Refusal as refusal:
        if refusal.code != "NOPERM":
            raise


def pause(keys: Keys) -> Flow[None]:
    yield command("SET", keys.paused, "1", safe=True)


def resume(keys: Keys) -> Flow[None]:
    yield command("DEL", keys.paused, safe=True)


def results(keys: Keys, ids: Sequence[str]) -> Flow[list[Any]]:
    """The stored bytes of each job's result, None where there is none."""
    replies = yield Batch(tuple(command("GET", keys.result(job_id), safe=True) for job_id in ids))
    return values(replies)


def fade(keys: Keys, seconds: int) -> Flow[None]:
    """Let a queue that is for a moment only expire, should whoever made it not come to ``drop`` it."""
    yield Batch(tuple(command("EXPIRE", key, seconds, safe=True) for key in keys.standing))


def drop(keys: Keys) -> Flow[None]:
    """Remove a queue. Results and markers of ids stay until they expire."""
    yield command("UNLINK", *keys.standing, safe=True)


def blocks_and_ttl(stage: str) -> Flow[tuple[int, int]]:
    """How many blocks a stage holds, and the milliseconds it has left; -1 when it stays, 0 and -2 when it is gone."""
    blocks, left = values((yield Batch((command("HLEN", stage, safe=True), command("PTTL", stage, safe=True)))))
    return number(blocks), number(left)
