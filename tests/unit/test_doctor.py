"""doctor: facts in, findings out. No server needed."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from chasqui.doctor import Facts, Finding, Severity, judge, worst
from chasqui.job import Overview, WorkerSeen
from chasqui.protocol.capabilities import Capabilities
from chasqui.protocol.examine import ServerFacts

GOOD_SERVER = ServerFacts(
    info={"redis_version": "8.10.0", "role": "master", "connected_slaves": "0", "maxmemory": "0", "used_memory": "1"},
    settings={"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "maxmemory": "0"},
    capabilities=Capabilities(True, True, True),
    can_wait_for_disk=True,
    user="chasqui-operator",
    forbidden=(),
)
GOOD_QUEUE = Overview(
    queue="q",
    group="default",
    group_exists=True,
    length=0,
    waiting=0,
    pending=0,
    delayed=0,
    dlq=0,
    events=0,
    repeatable=0,
    oldest_age_ms=0,
    next_due_ms=None,
    delayed_lag_ms=0,
    paused=False,
    promoter="p",
    scheduler="s",
    added=0,
    dead=0,
    workers=[WorkerSeen("w", 0, 100)],
    now_ms=1,
)
GOOD = Facts(GOOD_SERVER, skew_ms=3, max_stream_len=1_000_000, before=GOOD_QUEUE, now=GOOD_QUEUE)


def server(**changes: Any) -> Facts:
    changed = {
        name: {**getattr(GOOD_SERVER, name), **value} if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(GOOD, server=dataclasses.replace(GOOD_SERVER, **changed))


def queue(**changes: Any) -> Facts:
    return dataclasses.replace(GOOD, now=dataclasses.replace(GOOD_QUEUE, **changes))


def of(facts: Facts, check: str) -> Finding:
    [found] = [finding for finding in judge(facts) if finding.check == check]
    return found


def test_where_all_is_well_everything_is_ok() -> None:
    assert {finding.severity for finding in judge(GOOD)} == {Severity.OK}


CASES = {
    "old server": (server(info={"redis_version": "6.0.9"}), "version", Severity.DANGER),
    "lacks commands": (server(capabilities=Capabilities(True, False, False)), "capabilities", Severity.NOTE),
    "replica": (server(info={"role": "slave"}), "role", Severity.DANGER),
    "replicas not waited for": (
        server(info={"connected_slaves": "2"}, settings={"min-replicas-to-write": "0"}),
        "role",
        Severity.NOTE,
    ),
    "nothing kept": (server(settings={"appendonly": "no", "save": ""}), "persistence", Severity.DANGER),
    "snapshots only": (server(settings={"appendonly": "no", "save": "3600 1"}), "persistence", Severity.DANGER),
    "fsync no": (server(settings={"appendfsync": "no"}), "persistence", Severity.DANGER),
    "everysec": (server(settings={"appendfsync": "everysec"}), "persistence", Severity.NOTE),
    "everysec without WAITAOF": (
        server(settings={"appendfsync": "everysec"}, can_wait_for_disk=False),
        "persistence",
        Severity.WARNING,
    ),
    "disk broken": (server(info={"aof_last_write_status": "err"}), "persistence", Severity.DANGER),
    "evicts queues": (
        server(settings={"maxmemory-policy": "allkeys-lru", "maxmemory": "100"}),
        "eviction",
        Severity.DANGER,
    ),
    "may evict one day": (server(settings={"maxmemory-policy": "allkeys-lru"}), "eviction", Severity.WARNING),
    "evicts markers": (
        server(settings={"maxmemory-policy": "volatile-lru", "maxmemory": "100"}),
        "eviction",
        Severity.WARNING,
    ),
    "nearly full": (server(info={"maxmemory": "100", "used_memory": "95"}), "memory", Severity.WARNING),
    "may not add": (server(forbidden=("XADD",)), "permissions", Severity.WARNING),
    "default user": (server(user="default"), "permissions", Severity.NOTE),
    "clock off": (dataclasses.replace(GOOD, skew_ms=-2_000), "clock", Severity.WARNING),
    "clock far off": (dataclasses.replace(GOOD, skew_ms=60_000), "clock", Severity.DANGER),
    "stuck worker": (queue(workers=[WorkerSeen("w", 3, 90_000)]), "workers", Severity.WARNING),
    "nobody works": (queue(waiting=5, length=5, workers=[]), "workers", Severity.WARNING),
    "growing pending": (queue(pending=2000, oldest_age_ms=120_000), "pending", Severity.WARNING),
    "near the cap": (queue(length=850_000), "capacity", Severity.DANGER),
    "overdue": (queue(delayed=1, delayed_lag_ms=20_000), "delayed jobs", Severity.WARNING),
    "no scheduler": (queue(repeatable=1, scheduler=None), "repeatable jobs", Severity.WARNING),
    "dying now": (queue(dlq=5), "dead letters", Severity.WARNING),
    "paused": (queue(paused=True), "state", Severity.NOTE),
    "claims gone stale": (dataclasses.replace(GOOD, stale=[("1-0", "w", 99_000, 1)]), "claims", Severity.NOTE),
    "clock not told": (dataclasses.replace(GOOD, skew_ms=None), "clock", Severity.NOTE),
    "fsync not told": (
        server(settings={"appendonly": "", "appendfsync": None}, info={"aof_enabled": "1"}),
        "persistence",
        Severity.NOTE,
    ),
    "a stranger": (dataclasses.replace(GOOD, strangers=[("k", "string", "stream")]), "keys", Severity.DANGER),
    "may not look": (dataclasses.replace(GOOD, before=None, now=None, refused="NOPERM"), "keys", Severity.WARNING),
    "poison": (dataclasses.replace(GOOD, stale=[("1-0", "w", 99_000, 9)]), "claims", Severity.WARNING),
}


@pytest.mark.parametrize("case", CASES)
def test_finding_has_its_severity_a_risk_and_a_fix(case: str) -> None:
    facts, check, severity = CASES[case]

    found = of(facts, check)

    assert found.severity == severity
    assert found.risk
    assert found.fix
    assert worst(judge(facts)) == severity


def test_a_paused_queue_without_workers_is_no_warning() -> None:
    assert of(queue(waiting=5, length=5, workers=[], paused=True), "workers").severity == Severity.OK


def test_a_server_that_tells_nothing_gives_notes_and_no_false_alarm() -> None:
    facts = Facts(ServerFacts({}, {}, Capabilities(), False, None, ()), 0, 1_000_000)

    assert worst(judge(facts)) == Severity.NOTE
    assert of(facts, "persistence").severity == Severity.NOTE


def test_without_a_queue_only_the_server_is_judged() -> None:
    checks = {finding.check for finding in judge(dataclasses.replace(GOOD, before=None, now=None))}

    assert "workers" not in checks
    assert "persistence" in checks


def test_every_check_is_in_the_documentation() -> None:
    source = Path(inspect.getfile(Finding)).read_text()
    page = (Path(__file__).parents[2] / "docs" / "chasquictl.md").read_text()
    rows = page.partition("| check | looks at |")[2].partition("\n\n")[0]
    documented = {name.strip() for row in rows.splitlines()[2:] for name in row.split(" | ")[0].strip("| ").split(",")}

    assert set(re.findall(r'Finding\(\s*"([^"]+)"', source)) == documented
