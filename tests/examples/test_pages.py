"""Every example of README.md and docs/ is run, page by page and top to bottom, as a reader would type it.

    ```python   run in one program per page; `spark` is there where a page uses it without making it
    ```sql      run through spark.sql
    ```sh       run by a shell, in between
    ```console  commands that set up a machine; only those that other tests and the Makefile's own targets run
    ```text, ```toml, ```ini   not programs

What a page leaves to the reader's imagination stands in a comment that begins with `<!-- hidden`, as Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chasqui import embedded

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^<!-- hidden\n(?P<hidden>.*?)^-->$|^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
KINDS = {"python", "sql", "sh", "console", "text", "toml", "ini"}
SETUP = ("make ", "git ", "cd ", "pip ", "apt-get ", "sudo ", "#")

HEAD = """
import subprocess, sys
def sh(code):
    done = subprocess.run(["sh", "-ec", code], capture_output=True, text=True, timeout=120)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"exit code {done.returncode}:\\n{code}\\n{done.stdout}{done.stderr}"
"""
SPARK = """
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
         .config("spark.sql.shuffle.partitions", "2").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate())
"""


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """Kind, text and first line of each block; hidden ones are Python."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        kind = "python" if match["hidden"] is not None else match["kind"]
        code = match["hidden"] if match["hidden"] is not None else match["code"]
        found.append((kind, code, text.count("\n", 0, match.start()) + 2))
    return found


def program(page: Path) -> str:
    """The page as one program, in which every block keeps its line numbers."""
    parts = [HEAD]
    if re.search(r"\bspark\b", "".join(code for kind, code, _ in blocks(page) if kind in ("python", "sql"))):
        parts.append(SPARK)
    for kind, code, line in blocks(page):
        if kind == "python":
            parts.append(f"exec(compile({chr(10) * (line - 1) + code!r}, {str(page)!r}, 'exec'))\n")
        elif kind == "sql":
            parts += [f"spark.sql({statement!r}).show()\n" for statement in code.split(";") if statement.strip()]
        elif kind == "sh":
            parts.append(f"sh({code!r})\n")
    return "".join(parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_say_what_they_are(page: Path) -> None:
    assert {kind for kind, _, _ in blocks(page)} <= KINDS
    setup = [line for kind, code, _ in blocks(page) if kind == "console" for line in code.splitlines() if line.strip()]
    assert [line for line in setup if not line.startswith(SETUP)] == []


@pytest.mark.timeout(320)  # a driver of its own per page, also on a machine that is busy
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(kind in ("python", "sql", "sh") for kind, _, _ in blocks(page))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    with embedded.start() as server:
        environment = {
            **os.environ,
            "CHASQUI_URL": server.url,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            # An editable install hides top-level modules from Spark's search; a real one does not.
            "PYTHONPATH": str(ROOT),
        }
        script = tmp_path / "page.py"
        script.write_text(program(page), encoding="utf-8")

        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("\tat "))
    assert done.returncode == 0, done.stdout[-3000:] + said[-5000:]
