"""chasquictl for tests: called in this process, or run as a program with or without a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest

from chasqui.cli import main

PROGRAM = [sys.executable, "-m", "chasqui"]


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one line of JSON that is its result."""
        [line] = self.out.splitlines()
        return json.loads(line)


class Ctl:
    """Runs commands against one server."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.url, self._capsys = url, capsys
        monkeypatch.setenv("CHASQUI_URL", url)

    def __call__(self, *args: str) -> Said:
        self._capsys.readouterr()
        code = main(args)
        written = self._capsys.readouterr()
        assert "Traceback" not in written.err
        return Said(code, written.out, written.err)

    def json(self, *args: str, code: int = 0) -> Any:
        said = self(*args, "--json")
        assert said.code == code, said
        return said.json


def start(url: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    """chasquictl as a process of its own."""
    env = {**os.environ, "CHASQUI_URL": url, "PYTHONUNBUFFERED": "1", **options.pop("env", {})}
    return subprocess.Popen(
        [*PROGRAM, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def on_terminal(url: str, *args: str, answer: str = "", within: float = 20.0) -> tuple[int, str]:
    """Run a command on a terminal of 100 columns, type the answer, and return its exit code and all that it drew."""
    parent, child = pty.openpty()
    env = {**os.environ, "CHASQUI_URL": url, "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}
    with subprocess.Popen([*PROGRAM, *args], env=env, stdin=child, stdout=child, stderr=child) as process:
        os.close(child)
        drawn, deadline = b"", time.monotonic() + within
        typed = not answer
        while time.monotonic() < deadline:
            if select.select([parent], [], [], 0.1)[0]:
                try:
                    data = os.read(parent, 65536)
                except OSError:  # the other end is closed: it has ended
                    break
                if not data:
                    break
                drawn += data
            if not typed and b"[y/N]" in drawn:
                os.write(parent, answer.encode() + b"\n")
                typed = True
        else:
            process.kill()
            raise AssertionError(f"not ended within {within} s: {drawn!r}")
        code = process.wait(within)
    os.close(parent)
    return code, drawn.decode(errors="replace")
