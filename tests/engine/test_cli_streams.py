"""chasquictl where its streams are not what one expects: closed, full, without Unicode; and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from chasqui import Producer, embedded
from chasqui.cli.jobs import CHUNK
from tests.engine.cli_tools import PROGRAM, start
from tests.engine.seen import key
from tests.support import eventually


@pytest.fixture(scope="module")
def one_url() -> Iterator[str]:
    """What is tried here does not depend on the kind of server."""
    with embedded.start() as server:
        yield server.url


def shell(url: str, line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A line for bash, in which CTL is chasquictl."""
    return subprocess.run(
        ["bash", "-c", line.replace("CTL", " ".join(PROGRAM))],
        env={**os.environ, "CHASQUI_URL": url, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("flag", ["", "--json"])
def test_results_that_cannot_be_written_are_a_failure_told_in_a_line(one_url: str, flag: str) -> None:
    done = shell(one_url, f"CTL inspect q {flag} > /dev/full", PYTHONUNBUFFERED="")

    assert done.returncode == 1
    assert done.stderr == "chasquictl: the output cannot be written: No space left on device\n"


def test_closed_streams_are_empty_and_swallow_everything(one_url: str) -> None:
    with Producer(one_url, queue="q") as producer:
        producer.add_in(60_000, 1, id="i")

    ends = shell(
        one_url,
        "CTL inspect q >&-; echo $?; CTL add q --lines - <&- >/dev/null; echo $?; "
        "CTL delayed cancel q i <&- 2>&-; echo $?; CTL inspect q <&- >&- 2>&-; echo $?",
    )

    assert ends.stdout.split() == ["0", "0", "1", "0"]
    assert "Traceback" not in ends.stderr
    with Producer(one_url, queue="q") as producer:
        assert producer.stats().delayed == 1, "nobody could be asked"


def test_a_terminal_without_unicode_gets_escapes_and_json_stays_json(one_url: str) -> None:
    with Producer(one_url, queue="u") as producer:
        producer.add_in(60_000, {"to": "Ñandú ☃"}, name="ñ")

    shown = shell(one_url, "CTL delayed list u", PYTHONIOENCODING="ascii")
    as_json = shell(one_url, "CTL delayed list u --json", PYTHONIOENCODING="ascii")

    assert (shown.returncode, as_json.returncode) == (0, 0)
    assert "\\u2603" in shown.stdout
    [job] = json.loads(as_json.stdout)["jobs"]
    assert (job["name"], job["payload"]) == ("ñ", {"to": "Ñandú ☃"})


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_ends_a_view_without_a_traceback(one_url: str, times: int) -> None:
    process = start(one_url, "watch", "q", "--json", "--interval-ms", "50")
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)

    # The second one may find the program on its way out.
    assert process.returncode in (130, -signal.SIGINT)[:times]
    assert err == ""


def test_replay_that_is_interrupted_says_how_far_it_came_and_how_to_go_on(one_url: str) -> None:
    with redis.Redis.from_url(one_url) as client, Producer(one_url, queue="r") as producer:
        producer.add_bulk(range(60))
        for _, entry in client.xrange(key("r", "stream")):
            client.xadd(key("r", "dlq"), entry)
        client.delete(key("r", "stream"))
        process = start(one_url, "dlq", "replay", "r", "--rate", "10", "--yes")
        eventually(lambda: producer.stats().waiting >= 10, within=20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        moved = producer.stats().waiting
        left = producer.stats().dlq

    assert process.returncode == 130
    assert err == f"replayed at least {moved} of 60 dead letters; go on with --limit {left}\n"
    assert moved + left == 60


def test_lines_that_are_interrupted_say_how_many_are_in_and_what_is_left(one_url: str) -> None:
    process = start(one_url, "add", "l", "--lines", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("\n" + "1\n" * (CHUNK + 7))
    process.stdin.flush()
    with Producer(one_url, queue="l") as producer:
        eventually(lambda: producer.stats().waiting >= CHUNK, within=20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)

        assert producer.stats().waiting == CHUNK
    assert process.returncode == 130
    rest = f"tail -n +{CHUNK + 2} FILE | chasquictl add l --lines -"
    assert err == f"added 10,000 jobs, up to line 10,001; for the rest: {rest}\n"


def test_a_full_queue_tells_which_lines_are_in(one_url: str, tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text("1\n" * (2 * CHUNK + 5))

    done = shell(one_url, f"CTL add f --lines {file} --max-stream-len {CHUNK}")

    with Producer(one_url, queue="f") as producer:
        added = producer.stats().waiting
    assert done.returncode == 4
    assert CHUNK <= added < 2 * CHUNK + 5
    assert f"added {added:,} jobs, up to line {added:,}; for the rest: tail -n +{added + 1} {file} |" in done.stderr


def test_bench_that_is_interrupted_twice_leaves_nothing_behind(one_url: str) -> None:
    with redis.Redis.from_url(one_url) as client:

        def measured() -> list[bytes]:
            return list(client.scan_iter(match="*chasqui-bench-*", count=1000))

        process = start(one_url, "bench", "--jobs", "2000000")
        eventually(lambda: any(client.xlen(stream) > 20_000 for stream in measured()), within=30)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)

        assert (process.returncode, err) == (130, "")
        assert measured() == []
