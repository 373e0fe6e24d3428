"""What was measured, as a page and a picture: docs/benchmarks.md and docs/benchmarks.svg are made from latest.json."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

DOCS = Path(__file__).parents[1] / "docs"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP = 860, 250, 150, 16, 8
_MOST = 3.0  # bars longer than three times their target are cut

HEAD = """# Benchmarks

`make bench` measures each row beside its floor or its peer in one run, in turns, and takes medians: machines differ and
are noisy, ratios within one run are not. `make bench ROWS=a,b` runs some. This page is made from
`benchmarks/results/latest.json`, the last run that was committed.

![Every row against its target](benchmarks.svg)

"""


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def page(results: dict[str, Any]) -> str:
    machine = "\n".join(f"| {name} | {value} |" for name, value in results["machine"].items())
    return f"{HEAD}{table(results['rows'])}\n\n## The machine\n\n| what | value |\n| --- | --- |\n{machine}\n"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| row | ours | reference | ratio | target | |", "| --- | ---: | ---: | ---: | ---: | --- |"]
    for row in rows:
        sign = "≤" if row["at_most"] else "≥"
        if row["ratio"] is None:
            lines.append(f"| {row['row']} | – | – | – | {sign} {row['target']:g} | not run: {row['note']} |")
            continue
        verdict = "" if row["met"] else " **missed**"
        lines.append(
            f"| {row['row']} | {_figure(row['ours'])} | {_figure(row['reference'])} | {row['ratio']:.2f} | "
            f"{sign} {row['target']:g} | {row['unit']}; against {row['against']}{verdict} |"
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
        out.append(f'<text x="{_LEFT + length + 6:.1f}" y="{y + 12}" fill="#444">{share:.2f} × target</text>')
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
