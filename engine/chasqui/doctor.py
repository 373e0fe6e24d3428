"""Is this server fit for job queues, and is this queue well? Facts in, findings out.

``judge`` is pure: every threshold and every piece of advice is here, and can be tested without a server. ``gather``
is the thin part that asks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

from chasqui.errors import ConnectionLost, RedisError
from chasqui.job import Overview
from chasqui.protocol import examine, survey
from chasqui.protocol.examine import ServerFacts
from chasqui.protocol.keys import Keys
from chasqui.redis_io import Link

OLDEST_SERVER = (6, 2)
SKEW_MS = 1_000
BAD_SKEW_MS = 30_000
STUCK_MS = 60_000
OVERDUE_MS = 10_000
MEMORY_SHARE = 0.9
# Native writers trim at their cap itself; ours stop at 0.9 of it. From here on there is reason to look.
NEAR_CAP = 0.8
POISON_DELIVERIES = 3
# Two looks, this far apart, tell a pending list that grows from one that is merely long.
LOOK_APART_S = 1.0


class Severity(IntEnum):
    """How bad it is, in order."""

    OK = 0
    NOTE = 1
    WARNING = 2
    DANGER = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``risk``: what can happen; ``fix``: what to do. Both are empty where all is well."""

    check: str
    severity: Severity
    found: str
    risk: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known. ``before`` and ``now`` are two looks at the queue; both are None when no queue was named, or when
    it cannot be looked at: then ``refused`` says why.

    ``skew_ms`` is None where the server does not tell its time. ``stale`` are claims that nobody renewed within the
    group's threshold: entry id, worker, idle ms, deliveries. ``strangers`` are keys under the queue's name that are
    none of a queue: key, type, expected type.
    """

    server: ServerFacts
    skew_ms: int | None
    max_stream_len: int
    before: Overview | None = None
    now: Overview | None = None
    stale: list[tuple[str, str, int, int]] = field(default_factory=list)
    strangers: list[tuple[str, str, str]] = field(default_factory=list)
    refused: str = ""


def gather(link: Link, queue: str | None, group: str, *, max_stream_len: int, stale_ms: int) -> Facts:
    """Ask the server; with a queue, look at it twice. What the server refuses is left out, and the rest goes on."""
    keys = Keys(queue or "default")
    server = link.run(examine.server(keys))
    skews = [skew for skew in (_skew(link, keys) for _ in range(3)) if skew is not None]
    known = Facts(server, min(skews, key=abs, default=None), max_stream_len)
    if queue is None:
        return known
    known = replace(known, strangers=link.run(examine.strangers(keys)))
    try:
        known = replace(known, before=link.run(survey.overview(keys, group)))
        time.sleep(LOOK_APART_S)
        known = replace(known, now=link.run(survey.overview(keys, group)))
        return replace(known, stale=link.run(examine.backlog(keys, group, stale_ms)).oldest)
    except ConnectionLost:
        raise
    except RedisError as error:
        return replace(known, refused=error.message)


def _skew(link: Link, keys: Keys) -> int | None:
    """The server's clock less ours, at the middle of the exchange; the way there and back is the uncertainty."""
    sent = time.time_ns()
    told_ms = link.run(examine.clock(keys))
    middle_ms = (sent + time.time_ns()) // 2 // 1_000_000
    return None if told_ms is None else told_ms - middle_ms


def judge(facts: Facts) -> list[Finding]:
    """All findings, those about the server first."""
    server = facts.server
    found = [*_version(server), *_capabilities(server), *_role(server), *_persistence(server), *_eviction(server)]
    found += [*_memory(server), *_permissions(server), *_clock(facts), *_keys(facts)]
    if facts.now is not None and facts.before is not None:
        now, before = facts.now, facts.before
        found += [*_consumers(now), *_claims(facts), *_pending(before, now), *_capacity(facts, now)]
        found += [*_delayed(now), *_repeatable(now), *_dead(before, now), *_paused(now)]
    return found


def worst(findings: list[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


def _version(server: ServerFacts) -> Iterator[Finding]:
    name = "Valkey" if "valkey_version" in server.info else "Redis"
    text = server.info.get("valkey_version") or server.info.get("redis_version", "")
    parts = re.match(r"(\d+)\.(\d+)", text)
    if parts is None:
        yield Finding(
            "version",
            Severity.NOTE,
            "the server does not tell its version",
            "what it can do is tried out instead",
            "allow this user the command INFO",
        )
    elif (int(parts[1]), int(parts[2])) < OLDEST_SERVER:
        yield Finding(
            "version",
            Severity.DANGER,
            f"{name} {text}",
            "commands that the engine needs are missing",
            f"upgrade to Redis {'.'.join(map(str, OLDEST_SERVER))} or newer, or to Valkey",
        )
    else:
        yield Finding("version", Severity.OK, f"{name} {text}")


def _capabilities(server: ServerFacts) -> Iterator[Finding]:
    names = {"ack_delete": "XACKDEL", "claim_on_read": "XREADGROUP CLAIM", "idempotent_add": "XADD IDMP"}
    has = [word for attribute, word in names.items() if getattr(server.capabilities, attribute)]
    lacks = [word for word in names.values() if word not in has]
    if lacks:
        yield Finding(
            "capabilities",
            Severity.NOTE,
            f"without {', '.join(lacks)}",
            "none for this engine, which does the same by scripts; native ChasquiMQ workers need them all",
            "Redis 8.6 or newer, if native workers are to share the queues",
        )
    else:
        yield Finding("capabilities", Severity.OK, ", ".join(has))


def _role(server: ServerFacts) -> Iterator[Finding]:
    if server.info.get("role") == "slave":
        yield Finding(
            "role",
            Severity.DANGER,
            "a read-only replica",
            "nothing can be added or worked on",
            "give the url of the primary, or a redis+sentinel:// url that finds it",
        )
    elif int(_number(server.info.get("connected_slaves"))) > 0 and server.settings.get("min-replicas-to-write") == "0":
        yield Finding(
            "role",
            Severity.NOTE,
            f"primary with {server.info['connected_slaves']} replicas, which it does not wait for",
            "a failover loses what the replica had not received yet",
            "set min-replicas-to-write 1 and min-replicas-max-lag 10 to bound that",
        )


def _persistence(server: ServerFacts) -> Iterator[Finding]:
    if server.info.get("aof_last_write_status", "ok") != "ok":
        yield Finding(
            "persistence",
            Severity.DANGER,
            "the last write to the append-only file failed",
            "nothing is safe until it can be written again",
            "look for a full or broken disk; the server's log says more",
        )
        return
    aof = server.settings.get("appendonly") or ("yes" if server.info.get("aof_enabled") == "1" else "no")
    if not server.settings and "aof_enabled" not in server.info:
        yield Finding(
            "persistence",
            Severity.NOTE,
            "the server does not tell how it persists",
            "whether jobs survive a crash of the server cannot be said",
            "allow this user CONFIG GET and INFO, or check appendonly and appendfsync by hand",
        )
        return
    fsync = server.settings.get("appendfsync")
    if aof == "no":
        save = server.settings.get("save")
        kept = "nothing is kept" if save == "" else f"snapshots only ({save})" if save else "snapshots at best"
        yield Finding(
            "persistence",
            Severity.DANGER,
            f"no append-only file; {kept}",
            "a crash of the server loses all jobs since the last snapshot",
            "set appendonly yes, and appendfsync everysec or always (conf/redis.conf)",
        )
    elif fsync == "no":
        yield Finding(
            "persistence",
            Severity.DANGER,
            "append-only file, written to disk when the system likes",
            "a crash of the machine loses about the last 30 seconds",
            "set appendfsync everysec or always",
        )
    elif fsync == "everysec" and not server.can_wait_for_disk:
        yield Finding(
            "persistence",
            Severity.WARNING,
            "append-only file, written to disk every second; no WAITAOF",
            "a crash of the machine loses up to the last second, exactly-once writes of Spark among it (never doubled)",
            "set appendfsync always, or upgrade to Redis 7.2 or Valkey, where commits wait for the disk",
        )
    elif fsync is None:
        yield Finding(
            "persistence",
            Severity.NOTE,
            "append-only file; the server does not tell how often it reaches the disk",
            "with appendfsync no, a crash of the machine loses about the last 30 seconds",
            "allow this user CONFIG GET, or check appendfsync by hand",
        )
    elif fsync == "everysec":
        yield Finding(
            "persistence",
            Severity.NOTE,
            "append-only file, written to disk every second",
            "a crash of the machine loses up to the last second of adds; commits of Spark wait for the disk",
            "set appendfsync always where plain adds must not be lost either",
        )
    else:
        yield Finding("persistence", Severity.OK, f"append-only file, appendfsync {fsync}")


def _eviction(server: ServerFacts) -> Iterator[Finding]:
    policy = server.settings.get("maxmemory-policy") or server.info.get("maxmemory_policy")
    if policy is None:
        yield Finding(
            "eviction",
            Severity.NOTE,
            "the server does not tell its policy",
            "with any other than noeviction, queues vanish when memory is full",
            "check that maxmemory-policy is noeviction",
        )
    elif policy != "noeviction":
        limited = _number(server.settings.get("maxmemory", server.info.get("maxmemory"))) > 0
        # volatile-* takes keys with a time to live: results, markers of ids, leases. Whole queues go with allkeys-*.
        severity = Severity.DANGER if limited and policy.startswith("allkeys") else Severity.WARNING
        lost = "whole queues" if policy.startswith("allkeys") else "results, markers of ids and leases"
        yield Finding(
            "eviction",
            severity,
            f"maxmemory-policy {policy}",
            f"when memory is full, {lost} are thrown away without a word",
            "set maxmemory-policy noeviction",
        )
    else:
        yield Finding("eviction", Severity.OK, "maxmemory-policy noeviction")


def _memory(server: ServerFacts) -> Iterator[Finding]:
    limit, used = _number(server.info.get("maxmemory")), _number(server.info.get("used_memory"))
    if limit > 0 and used >= MEMORY_SHARE * limit:
        yield Finding(
            "memory",
            Severity.WARNING,
            f"{used / limit:.0%} of maxmemory in use",
            "soon no job can be added, and none be settled",
            "let workers drain the queues, purge dead letters, or raise maxmemory",
        )


def _permissions(server: ServerFacts) -> Iterator[Finding]:
    who = f"user {server.user}" if server.user else "this user"
    if server.forbidden:
        yield Finding(
            "permissions",
            Severity.WARNING,
            f"{who} may not use {', '.join(server.forbidden)}",
            "roles that need these fail; for a user that only looks on, that is as it should be",
            "give each role its own user (conf/users.acl has them)",
        )
    elif server.user == "default":
        yield Finding(
            "permissions",
            Severity.NOTE,
            "connected as the user default, which may do everything",
            "any program with this address can read and delete every queue",
            "give each role its own user (conf/users.acl has them), and switch default off",
        )
    else:
        yield Finding("permissions", Severity.OK, f"{who} may do all that is needed")


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.skew_ms is None:
        yield Finding(
            "clock",
            Severity.NOTE,
            "the server does not tell its time",
            "where it differs from ours, delayed jobs of this machine run early or late",
            "allow this user the command TIME",
        )
        return
    skew = abs(facts.skew_ms)
    if skew < SKEW_MS:
        yield Finding("clock", Severity.OK, f"ours and the server's differ by {skew} ms")
    else:
        yield Finding(
            "clock",
            Severity.DANGER if skew >= BAD_SKEW_MS else Severity.WARNING,
            f"the server's clock is {skew / 1000:.1f} s {'ahead of' if facts.skew_ms > 0 else 'behind'} ours",
            "delayed and repeatable jobs of this machine run early or late by as much, and ages are wrong",
            "synchronise both clocks (NTP)",
        )


def _keys(facts: Facts) -> Iterator[Finding]:
    for key, found, expected in facts.strangers:
        yield Finding(
            "keys",
            Severity.DANGER,
            f"{key} holds a {found}; a queue has a {expected} there",
            "whatever needs this key fails: adding, working, looking",
            f"see what wrote it, then RENAME or DEL {key}",
        )
    if facts.refused and not facts.strangers:
        yield Finding(
            "keys",
            Severity.WARNING,
            f"the queue cannot be looked at: {facts.refused}",
            "nothing is known about its workers, its jobs and their ages",
            "ask as the user chasqui-observer of conf/users.acl",
        )


def _consumers(now: Overview) -> Iterator[Finding]:
    stuck = [w for w in now.workers if w.pending and w.idle_ms >= STUCK_MS]
    if stuck:
        named = ", ".join(f"{w.name} ({w.pending} jobs, silent for {w.idle_ms // 1000} s)" for w in stuck[:5])
        yield Finding(
            "workers",
            Severity.WARNING,
            f"{len(stuck)} hold jobs and are silent: {named}",
            "they crashed or hang; their jobs wait until another worker takes them over",
            "start a worker: it takes jobs over after claim_min_idle_ms; look why these ended",
        )
    elif now.waiting and not now.paused and not any(w.idle_ms < STUCK_MS for w in now.workers):
        yield Finding(
            "workers",
            Severity.WARNING,
            f"{now.waiting} jobs wait and no worker of group {now.group!r} has been heard of for a minute",
            "nobody works on this queue",
            "start one: chasquictl work MODULE:HANDLER --queue ...",
        )
    else:
        yield Finding("workers", Severity.OK, f"{len(now.workers)} in group {now.group!r}")


def _claims(facts: Facts) -> Iterator[Finding]:
    poison = [claim for claim in facts.stale if claim[3] > POISON_DELIVERIES]
    if poison:
        yield Finding(
            "claims",
            Severity.WARNING,
            f"{len(poison)} jobs were delivered more than {POISON_DELIVERIES} times and are not settled, the first: "
            f"{poison[0][0]}, {poison[0][3]} times",
            "a job that kills its worker goes round until its attempts are used up",
            "look at it with Spark's view pending, or at the worker's log; max_attempts sends it to the dead letters",
        )
    elif facts.stale:
        yield Finding(
            "claims",
            Severity.NOTE,
            f"{len(facts.stale)} claims have not been renewed in time",
            "their workers are gone; another takes them over",
            "none, as long as a worker runs",
        )


def _pending(before: Overview, now: Overview) -> Iterator[Finding]:
    grown = now.pending - before.pending
    if grown > 0 and now.pending > 1000 and now.oldest_age_ms > STUCK_MS:
        yield Finding(
            "pending",
            Severity.WARNING,
            f"{now.pending} jobs are being worked on, {grown} more than a second ago, the oldest for "
            f"{now.oldest_age_ms // 1000} s",
            "workers take jobs and do not settle them: the stream grows up to its cap",
            "look for handlers that hang; lower concurrency, or add workers",
        )
    else:
        yield Finding("pending", Severity.OK, f"{now.pending} jobs are being worked on")


def _capacity(facts: Facts, now: Overview) -> Iterator[Finding]:
    share = now.length / facts.max_stream_len
    if share >= NEAR_CAP:
        yield Finding(
            "capacity",
            Severity.DANGER,
            f"{now.length} jobs in the stream, {share:.0%} of max_stream_len ({facts.max_stream_len})",
            "writers of native ChasquiMQ trim at their cap, which drops the oldest waiting jobs; ours refuse new ones "
            "at 90 %",
            "add workers; raise max_stream_len everywhere; keep native producers off this queue until it is drained",
        )
    else:
        yield Finding("capacity", Severity.OK, f"{share:.0%} of max_stream_len")


def _delayed(now: Overview) -> Iterator[Finding]:
    if now.delayed_lag_ms >= OVERDUE_MS:
        leader = f"led by {now.promoter}" if now.promoter else "nobody promotes"
        yield Finding(
            "delayed jobs",
            Severity.WARNING,
            f"the first is overdue by {now.delayed_lag_ms // 1000} s; {leader}",
            "delayed jobs and retries do not run",
            "start a worker or a promoter; if one leads, the stream may be at its cap",
        )
    else:
        yield Finding("delayed jobs", Severity.OK, f"{now.delayed}, none overdue")


def _repeatable(now: Overview) -> Iterator[Finding]:
    if now.repeatable and now.scheduler is None:
        yield Finding(
            "repeatable jobs",
            Severity.WARNING,
            f"{now.repeatable}, and no scheduler leads",
            "none of them fires",
            "start a worker with run_scheduler, or a scheduler",
        )


def _dead(before: Overview, now: Overview) -> Iterator[Finding]:
    if now.dlq > before.dlq:
        yield Finding(
            "dead letters",
            Severity.WARNING,
            f"{now.dlq}, {now.dlq - before.dlq} more than a second ago",
            "jobs are being given up right now",
            "chasquictl dlq filter QUEUE --since 5m",
        )
    elif now.dlq:
        yield Finding(
            "dead letters",
            Severity.NOTE,
            str(now.dlq),
            "they are kept up to dlq_max_stream_len, then the oldest are dropped",
            "chasquictl dlq filter QUEUE, then replay or purge",
        )


def _paused(now: Overview) -> Iterator[Finding]:
    if now.paused:
        yield Finding("state", Severity.NOTE, "paused", "workers take no jobs", "chasquictl resume QUEUE")


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
