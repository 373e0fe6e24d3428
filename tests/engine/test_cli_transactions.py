"""chasquictl txn: writers and their stages, seen and forgotten."""

from __future__ import annotations

import pytest
import redis

from tests.engine.cli_tools import Ctl
from tests.engine.seen import key
from tests.engine.test_transactions import app as app
from tests.engine.test_transactions import commit, jobs, stage


@pytest.fixture
def ctl(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ctl:
    return Ctl(url, capsys, monkeypatch)


def test_a_committed_version_is_shown_with_its_queues(ctl: Ctl, url: str, queue: str, app: str) -> None:
    assert commit(url, app, 4, stage(url, {queue: jobs(1, 2, 3)}))

    [writer] = [w for w in ctl.json("txn", "list")["writers"] if w["writer"] == app]
    shown = ctl.json("txn", "show", app)

    assert (writer["version"], writer["state"]) == (4, "done")
    assert shown == writer
    assert [(q["queue"], q["version"], q["published"], q["rows"]) for q in shown["queues"]] == [(queue, 4, 3, 3)]
    assert f"writer {app}, version 4: done" in ctl("txn", "show", app).out


def test_stages_that_nobody_committed_are_counted_and_expire(
    ctl: Ctl, url: str, client: redis.Redis, queue: str
) -> None:
    stage(url, {queue: jobs(1, 2)}, ttl_ms=100_000)

    [found] = [row for row in ctl.json("txn", "stages")["queues"] if row["queue"] == queue]

    assert (found["stages"], found["blocks"], found["adopted"]) == (1, 1, 0)
    assert 0 < found["first_expires_ms"] <= 100_000
    assert queue in ctl("txn", "stages").out


def test_after_a_reset_any_version_is_taken(ctl: Ctl, url: str, client: redis.Redis, queue: str, app: str) -> None:
    commit(url, app, 9, stage(url, {queue: jobs(1)}))

    assert ctl("txn", "reset", app).code == 1, "without a terminal nobody has agreed"
    assert ctl.json("txn", "show", app)["version"] == 9
    assert ctl.json("txn", "reset", app, "--yes") == {"writer": app, "reset": True}

    assert ctl("txn", "show", app).code == 1
    assert ctl("txn", "reset", app, "--yes").code == 1
    assert commit(url, app, 0, stage(url, {queue: jobs(2)}))
    assert client.xlen(key(queue, "stream")) == 2


def test_a_name_that_no_writer_can_have_is_wrong_usage(ctl: Ctl) -> None:
    said = ctl("txn", "show", "{x}")

    assert said.code == 2
    assert "txn_app_id expects a name without braces" in said.err


def test_keys_that_are_none_of_a_writer_hide_no_other(
    ctl: Ctl, url: str, client: redis.Redis, queue: str, app: str
) -> None:
    commit(url, app, 4, stage(url, {queue: jobs(1)}))
    stage(url, {queue: jobs(1)}, ttl_ms=100_000)
    client.set(f"{{chasqui-txn:{queue}}}:txn", "x", ex=60)
    client.set(key(queue, "stage:x"), "x", ex=60)

    writers, stages = ctl("txn", "list"), ctl("txn", "stages")

    assert (writers.code, stages.code) == (0, 0)
    states = {line.split()[0]: line.split()[2] for line in writers.out.splitlines()}
    assert (states[app], states[queue]) == ("done", "unreadable")
    assert queue in stages.out
    assert f"{key(queue, 'stage:x')} is passed over: " in stages.err
