"""What ``doctor`` asks a server, as flows. Nothing here changes anything: trials name a key that does not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chasqui.protocol.capabilities import Capabilities, probe
from chasqui.protocol.flow import Arg, Batch, Flow, Refusal, command
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import fields, number, plain

_SECTIONS = ("server", "memory", "persistence", "replication")
_SETTINGS = ("appendonly", "appendfsync", "save", "maxmemory", "maxmemory-policy", "min-replicas-to-write")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself. ``info`` and ``settings`` lack what it does not tell this user."""

    info: dict[str, str]
    settings: dict[str, str]
    capabilities: Capabilities
    can_wait_for_disk: bool
    user: str | None
    forbidden: tuple[str, ...]


def server(keys: Keys) -> Flow[ServerFacts]:
    """Ask the server that holds the queue; in a cluster the queue's key in each batch sees to that."""
    here = command("XLEN", f"{keys.prefix}:nowhere", safe=True)
    _, *told = yield Batch((here, *(command("INFO", section, safe=True) for section in _SECTIONS)))
    _, *found = yield Batch((here, *(command("CONFIG", "GET", name, safe=True) for name in _SETTINGS)))
    _, docs, user = yield Batch(
        (here, command("COMMAND", "INFO", "WAITAOF", safe=True), command("ACL", "WHOAMI", safe=True))
    )
    capabilities = yield from probe(keys)
    forbidden = yield from _forbidden(keys)
    return ServerFacts(
        info={name: value for text in told for name, value in _lines(text)},
        settings={plain(k): plain(v) for reply in found for k, v in _pairs(reply)},
        capabilities=capabilities,
        can_wait_for_disk=isinstance(docs, list) and bool(docs) and bool(docs[0]),
        user=None if isinstance(user, Refusal) else plain(user),
        forbidden=forbidden,
    )


def clock(keys: Keys) -> Flow[int | None]:
    """The server's time in epoch ms; None where it does not tell this user."""
    _, now = yield Batch((command("XLEN", f"{keys.prefix}:nowhere", safe=True), command("TIME", safe=True)))
    return None if isinstance(now, Refusal) else number(now[0]) * 1000 + number(now[1]) // 1000


def strangers(keys: Keys) -> Flow[list[tuple[str, str, str]]]:
    """Keys under the queue's name that hold something else than the queue would: key, type, expected type."""
    expected = {
        **dict.fromkeys((keys.stream, keys.dlq, keys.events), "stream"),
        **dict.fromkeys((keys.delayed, keys.repeat), "zset"),
        **dict.fromkeys((keys.paused, keys.promoter_lock, keys.scheduler_lock), "string"),
    }
    replies = yield Batch(tuple(command("TYPE", key, safe=True) for key in expected))
    found = [(key, "none" if isinstance(r, Refusal) else plain(r)) for key, r in zip(expected, replies, strict=True)]
    return [(key, kind, expected[key]) for key, kind in found if kind not in ("none", expected[key])]


@dataclass(frozen=True, slots=True)
class Backlog:
    """The oldest claims of a group: how long since each was renewed, how often delivered, and by whom held."""

    oldest: list[tuple[str, str, int, int]]


def backlog(keys: Keys, group: str, idle_ms: int, count: int = 100) -> Flow[Backlog]:
    """Claims that nobody has renewed for so long: entry id, worker, idle time, deliveries."""
    try:
        reply = yield command("XPENDING", keys.stream, group, "IDLE", idle_ms, "-", "+", count, safe=True)
    except Refusal as refusal:
        if refusal.code in ("NOGROUP", "ERR"):
            return Backlog([])
        raise
    return Backlog([(plain(i), plain(who), number(idle), number(times)) for i, who, idle, times in reply])


# Commands that producers, workers and tools send, each in a form that does nothing. Permission is looked at before
# anything else is, so a refusal for another reason means that the command is allowed.
def _trials(key: str) -> tuple[tuple[Arg, ...], ...]:
    return (
        ("XADD", key, "NOMKSTREAM", "*", "f", "v"),
        ("XRANGE", key, "-", "+", "COUNT", 1),
        ("XREADGROUP", "GROUP", "g", "c", "STREAMS", key, ">"),
        ("XREAD", "COUNT", 1, "STREAMS", key, "0"),
        ("XACK", key, "g", "0-1"),
        ("XDEL", key, "0-1"),
        ("XCLAIM", key, "g", "c", 0, "0-1"),
        ("XPENDING", key, "g"),
        ("XTRIM", key, "MAXLEN", 1),
        ("XINFO", "STREAM", key),
        ("XGROUP", "CREATE", key, "g", "0"),
        ("ZADD", key, "XX", 1, "m"),
        ("ZREM", key, "m"),
        ("ZRANGE", key, 0, 0),
        ("ZSCAN", key, 0),
        ("SET", key, "v", "XX"),
        ("GET", key),
        ("HGET", key, "f"),
        ("UNLINK", key),
        ("EXPIRE", key, 1),
        ("EVALSHA", "0" * 40, 1, key),
        ("EVAL", "return 1", 1, key),
    )


def _forbidden(keys: Keys) -> Flow[tuple[str, ...]]:
    trials = _trials(f"{keys.prefix}:nowhere")
    replies = yield Batch(tuple(command(*trial, safe=True) for trial in trials))
    return tuple(
        str(trial[0]) for trial, reply in zip(trials, replies, strict=True) if getattr(reply, "code", "") == "NOPERM"
    )


def _lines(text: Any) -> list[tuple[str, str]]:
    if isinstance(text, Refusal):
        return []
    return [(name, value) for line in plain(text).splitlines() for name, colon, value in [line.partition(":")] if colon]


def _pairs(reply: Any) -> list[tuple[bytes, bytes]]:
    return [] if isinstance(reply, Refusal) else list(fields(reply).items())
