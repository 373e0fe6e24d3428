"""chasquictl for tests: called in this process, or run as a program with or without a terminal."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chasqui.cli import main

ROOT = Path(__file__).parents[2]
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


@functools.cache
def documented(command: str) -> list[set[str]]:
    """The names that docs/chasquictl.md promises in the JSON of a command; several where it has several shapes."""
    for row in (ROOT / "docs" / "chasquictl.md").read_text().splitlines():
        cells = row.split(" | ")
        if len(cells) == 2 and f"`{command}`" in cells[0] and "`{" in cells[1]:
            return [_names(shape) for shape in re.findall(r"`(\{.*?\})`(?!\w)", cells[1])]
    return []


def _names(shape: str) -> set[str]:
    """The names at the top of a shape such as ``{a, b: [{c}]}``."""
    inner = shape[1:-1]
    while (flat := re.sub(r"\[[^\[\]{}]*\]|\{[^\[\]{}]*\}", "", inner)) != inner:
        inner = flat
    return {part.partition(":")[0].strip() for part in inner.split(",")}


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
        words = [word for word in args[:2] if word.isalpha()]
        promised = documented(" ".join(words)) or documented(words[0])
        assert set(said.json) in promised, f"docs/chasquictl.md promises {promised}"
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
