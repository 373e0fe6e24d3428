"""chasquictl as a program: workers and signals, terminals, unreachable servers, readers that go away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from chasqui import NewJob, Producer
from chasqui.embedded import EmbeddedServer
from tests.engine.cli_tools import PROGRAM, on_terminal, start
from tests.engine.seen import key
from tests.engine.test_cli_queues import dead
from tests.engine.worker_tools import nothing_left
from tests.support import eventually

HANDLERS = """
import time
import chasqui

def send(job):
    if job.payload == "bad":
        raise ValueError("boom\\x1b[2J")
    if job.payload == "slow":
        time.sleep(60)
    return job.payload

router = chasqui.Router().on("n", send)
number = 7
"""


@pytest.fixture
def handlers(tmp_path: Path) -> Path:
    (tmp_path / "mail.py").write_text(HANDLERS)
    (tmp_path / "broken.py").write_text("x = 1\nundefined_name\n")
    return tmp_path


@pytest.mark.parametrize("handler", ["mail:send", "mail:router"])
def test_worker_works_and_ends_in_order_on_sigterm(
    handlers: Path, url: str, client: redis.Redis, queue: str, handler: str
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(["ok"] * 20 + ["bad"], name="n")

    process = start(
        url, "work", handler, "--queue", queue, "--max-attempts", "1", "--block-ms", "100", "--json", cwd=handlers
    )
    try:
        eventually(lambda: client.xlen(key(queue, "dlq")) == 1 and nothing_left(client, queue), within=30)
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)

    told = json.loads(out)
    assert process.returncode == 0, err
    [failed] = [line for line in err.splitlines() if "failed in run 1" in line]
    assert "(n) failed in run 1: ValueError: boom\\x1b[2J (" in failed
    assert "mail.py:7)" in failed
    assert {name: told[name] for name in ("done", "failed", "retried", "dead")} == {
        "done": 20,
        "failed": 1,
        "retried": 0,
        "dead": 1,
    }


def test_a_second_signal_ends_a_worker_at_once_and_its_exit_code_says_so(
    handlers: Path, url: str, client: redis.Redis, queue: str
) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add("slow")
        process = start(url, "work", "mail:send", "--queue", queue, "--block-ms", "100", cwd=handlers)
        assert process.stderr is not None
        eventually(lambda: producer.stats().pending == 1, within=30)
        process.send_signal(signal.SIGINT)
        while "a second signal ends it at once" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)

        assert process.returncode == 130
        assert out.startswith("0 done, 0 failed")
        assert "Traceback" not in err
        assert producer.stats().pending == 1, "the job stays claimed, and another worker takes it over"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mail", "expected MODULE:HANDLER"),
        ("nowhere:send", "there is no module 'nowhere'"),
        ("mail:nothing", "mail has no 'nothing'"),
        ("mail:number", "mail:number is a int; expected a function"),
        ("broken:send", "broken cannot be imported: NameError"),
    ],
)
def test_handler_that_cannot_be_had_is_told_in_a_line(handlers: Path, spec: str, words: str) -> None:
    done = subprocess.run([*PROGRAM, "work", spec], cwd=handlers, capture_output=True, text=True, timeout=30)

    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unreachable_server_ends_with_three_and_hides_the_password() -> None:
    url = "redis://me:s3cret@127.0.0.1:1/0"

    done = subprocess.run(
        [*PROGRAM, "inspect", "q", "--reconnect-attempts", "0"],
        env={**os.environ, "CHASQUI_URL": url},
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.returncode == 3
    assert "127.0.0.1:1 cannot be reached" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def test_events_follow_until_interrupted(url: str, client: redis.Redis, queue: str) -> None:
    process = start(url, "events", queue, "--from", "0")
    client.xadd(key(queue, "events"), {"e": "active", "id": "i", "ts": "1794978715267", "n": "x", "attempt": "1"})
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)

    assert line.startswith("2026-11-18T05:11:55.267Z ")
    assert line.endswith("active id=i name=x attempt=1\n")
    assert process.returncode == 130


def test_reader_that_goes_away_is_no_failure(url: str, client: redis.Redis, queue: str) -> None:
    for i in range(5000):
        client.xadd(key(queue, "events"), {"e": "active", "id": f"{i}" * 20, "ts": "1"})

    done = subprocess.run(
        f"{' '.join(PROGRAM)} events {queue} --from 0 --no-follow | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        env={**os.environ, "CHASQUI_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stderr == ""
    assert done.returncode == 0


def test_on_a_terminal_replay_asks_and_heeds_the_answer(url: str, client: redis.Redis, queue: str) -> None:
    dead(url, client, queue, [NewJob(1), NewJob(2)])

    refused, drawn = on_terminal(url, "dlq", "replay", queue, answer="n")
    agreed, _ = on_terminal(url, "dlq", "replay", queue, "--limit", "1", answer="y")

    assert refused == 1
    assert f"Put 2 dead letters of {queue} back?" in drawn
    assert agreed == 0
    assert client.xlen(key(queue, "dlq")) == 1


def test_on_a_terminal_watch_draws_figures_with_their_history(url: str, queue: str) -> None:
    with Producer(url, queue=queue) as producer:
        producer.add_bulk(range(1234))

    code, drawn = on_terminal(url, "watch", queue, "--count", "3", "--interval-ms", "50")

    assert code == 0
    assert "1,234" in drawn
    assert "█" in drawn
    assert "…" not in drawn, "nothing is cut on a terminal of 100 columns"


def test_lines_come_from_standard_input(url: str, client: redis.Redis, queue: str) -> None:
    done = subprocess.run(
        [*PROGRAM, "add", queue, "--lines", "-", "--name", "n"],
        input='{"n": 1}\n{"n": 2}\n',
        env={**os.environ, "CHASQUI_URL": url},
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert (done.returncode, done.stdout) == (0, "added 2 jobs\n")
    assert client.xlen(key(queue, "stream")) == 2


def test_bench_measures_and_leaves_nothing_behind(url: str, client: redis.Redis) -> None:
    process = start(url, "bench", "--jobs", "2000", "--json")
    out, err = process.communicate(timeout=60)

    told = json.loads(out)
    assert process.returncode == 0, err
    assert told["jobs"] == 2000
    assert told["added_per_s"] > 0
    assert told["drained_per_s"] > 0
    assert list(client.scan_iter(match="*chasqui-bench-*", count=1000)) == []


def test_worker_serves_metrics_and_health(handlers: Path, url: str, queue: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Producer(url, queue=queue) as producer:
        producer.add("ok", name="n")

    def fetched(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    process = start(
        url, "work", "mail:send", "--queue", queue, "--block-ms", "100", "--metrics-port", str(port), cwd=handlers
    )
    try:
        eventually(lambda: "ok" in fetched("/healthz"), within=30)
        eventually(lambda: f'chasqui_worker_healthy{{queue="{queue}"}} 1.0' in fetched("/metrics"))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)

    assert process.returncode == 0


def test_a_file_with_tables_of_other_roles_serves_every_command(url: str, queue: str, tmp_path: Path) -> None:
    file = tmp_path / "chasqui.toml"
    file.write_text(f'url = "{url}"\n[consumer]\nconcurrency = 3\n[producer]\nmax_stream_len = 5\n')
    env = {name: value for name, value in os.environ.items() if not name.startswith("CHASQUI_")}
    env["CHASQUI_CONFIG"] = str(file)
    calls = (["add", queue, "1"], ["events", queue, "--no-follow"], ["txn", "list"], ["inspect", queue])

    ends = [subprocess.run([*PROGRAM, *c], env=env, capture_output=True, timeout=30).returncode for c in calls]

    assert ends == [0, 0, 0, 0]


def test_replay_that_is_killed_leaves_every_job_in_one_place(url: str, client: redis.Redis, queue: str) -> None:
    dead(url, client, queue, [NewJob(i) for i in range(40)])

    process = start(url, "dlq", "replay", queue, "--rate", "10", "--yes")
    eventually(lambda: client.xlen(key(queue, "stream")) >= 10, within=20)
    process.kill()
    process.communicate(timeout=20)

    moved, left = client.xlen(key(queue, "stream")), client.xlen(key(queue, "dlq"))
    assert 10 <= moved < 40
    assert moved + left == 40


def test_watch_waits_out_a_server_that_is_gone(start_like: Callable[..., EmbeddedServer]) -> None:
    server = start_like(directory=None, port=None)
    process = start(
        server.url, "watch", "q", "--interval-ms", "50", "--json", "--reconnect-attempts", "0", "--count", "1000"
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert json.loads(process.stdout.readline())["waiting"] == 0
        server.kill()
        assert "Still trying." in process.stderr.readline()
        server.restart()
        with Producer(server.url, queue="q") as producer:
            producer.add_bulk(range(7))
        eventually(lambda: json.loads(process.stdout.readline())["waiting"] == 7, within=20)
    finally:
        process.kill()
        process.communicate(timeout=20)
