"""chasquictl where its streams are not what one expects: closed, full, without Unicode; and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from chasqui import Producer, embedded
from tests.engine.cli_tools import PROGRAM, start


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
