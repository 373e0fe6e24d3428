"""What was measured, as a page and a picture: docs/benchmarks.md and docs/benchmarks.svg are made from latest.json."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.rows import meaning

DOCS = Path(__file__).parents[1] / "docs"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP = 860, 250, 150, 16, 8
_MOST = 3.0  # bars longer than three times their target are cut

HEAD = """# Benchmarks

Machines differ and are noisy, so `make bench` measures each row and its reference in turns, in the same run, and
compares medians; figures of memory are measured once. `make bench ROWS=a,b` runs some rows and replaces only those.
This page is made from `benchmarks/results/latest.json`, the last run that was committed.

Handlers do nothing, so these are rates of the queue and not of your work. Rows of Spark use both cores and a Java
machine, those of workers and producers one process. "native" is the package `chasquimq`; its rows run on Redis 8.10,
all others on the embedded Valkey.

![Every row against its target](benchmarks.svg)

The bars show how far a row is beyond its target: ratio by target, or target by ratio where the ratio must stay below
it. Long ones are cut where they end in `…`.

"""


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def page(results: dict[str, Any]) -> str:
    machine = "\n".join(f"| {name} | {value} |" for name, value in results["machine"].items())
    rows = "\n".join(f"| {row['row']} | {meaning(row['row'])} |" for row in results["rows"])
    about = f"## What is measured\n\n| row | what |\n| --- | --- |\n{rows}\n\n"
    return f"{HEAD}{table(results['rows'])}\n\n{about}## The machine\n\n| what | value |\n| --- | --- |\n{machine}\n"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| row | unit | ours | reference | ratio | target | reference is |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        sign = "≤" if row["at_most"] else "≥"
        if row["ratio"] is None:
            lines.append(
                f"| {row['row']} | {row['unit']} | – | – | – | {sign} {row['target']:g} | not run: {row['note']} |"
            )
            continue
        verdict = "" if row["met"] else " **missed**"
        lines.append(
            f"| {row['row']} | {row['unit']} | {_figure(row['ours'])} | {_figure(row['reference'])} | "
            f"{row['ratio']:.2f} | {sign} {row['target']:g} | {row['against']}{verdict} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]]) -> str:
    """How far each row is beyond its target, as bars: the line is the target."""
    measured = [row for row in rows if row["ratio"]]
    height = len(measured) * (_BAR + _GAP) + 60
    scale = (_WIDTH - _LEFT - _RIGHT) / _MOST
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for place, row in enumerate(measured):
        share = row["target"] / row["ratio"] if row["at_most"] else row["ratio"] / row["target"]
        y = 20 + place * (_BAR + _GAP)
        colour = "#2a7f62" if row["met"] else "#b5482a"
        length = min(share, _MOST) * scale
        out.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{html.escape(row["row"])}</text>')
        out.append(f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>')
        cut = "… " if share > _MOST else ""
        out.append(f'<text x="{_LEFT + length + 6:.1f}" y="{y + 12}" fill="#444">{cut}{share:.2f} × target</text>')
    line = _LEFT + scale
    out.append(f'<line x1="{line}" y1="8" x2="{line}" y2="{height - 28}" stroke="#222" stroke-dasharray="4 3"/>')
    out.append(f'<text x="{line}" y="{height - 12}" text-anchor="middle" fill="#222">target</text>')
    return "\n".join([*out, "</svg>", ""])


def readme(text: str, rows: list[dict[str, Any]]) -> str:
    """The README with its figures replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(rows)}\n{END}{after}"


def write() -> None:
    results = load()
    (DOCS / "benchmarks.md").write_text(page(results))
    (DOCS / "benchmarks.svg").write_text(plot(results["rows"]))
    if BEGIN in README.read_text():
        README.write_text(readme(README.read_text(), results["rows"]))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    write()
