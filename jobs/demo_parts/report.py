"""The demo's last word: a page with a table and charts that needs no network."""

from __future__ import annotations

import html

from demo_parts.figures import Figures

INK, GREEN, RED, BLUE = "#2b2b2b", "#2a7f62", "#b5482a", "#31688e"
WIDTH, HEIGHT, MARGIN = 760, 240, 44


def page(figures: Figures) -> str:
    table = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in figures.rows())
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>chasqui-spark demo</title>
<style>
 body {{ font: 15px system-ui, sans-serif; color: {INK}; max-width: 800px; margin: 2rem auto; padding: 0 1rem; }}
 td {{ padding: .2rem 1.5rem .2rem 0; }} td + td {{ text-align: right; font-variant-numeric: tabular-nums; }}
 svg {{ width: 100%; height: auto; }} h2 {{ margin: 2rem 0 .3rem; font-size: 1.1rem; }}
</style>
<h1>chasqui-spark demo</h1>
<p>A stream of orders was scored in Spark and enqueued exactly once; worker processes ran the jobs, and one of them was
killed on the way.</p>
<table>{table}</table>
<h2>Throughput</h2>{throughput(figures.per_second)}
<h2>Latency, from the job's creation to its end</h2>{histogram(figures.latency_ms)}
<h2>Outcomes by job name</h2>{stacked(figures.outcomes)}
</html>
"""


def throughput(per_second: list[tuple[int, int, int]]) -> str:
    """Jobs created and completed in every second, as two lines."""
    if not per_second:
        return ""
    top = max(max(created, completed) for _, created, completed in per_second) or 1
    last = max(per_second[-1][0], 1)

    def line(which: int, colour: str) -> str:
        points = " ".join(f"{_x(row[0] / last):.1f},{_y(row[which] / top):.1f}" for row in per_second)
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'

    return _chart(
        line(1, BLUE) + line(2, GREEN) + _legend([("enqueued", BLUE), ("completed", GREEN)]),
        f"{top:,} jobs/s",
        f"{last} s",
    )


def histogram(values: list[float], bins: int = 40) -> str:
    """How many jobs took how long; the slowest hundredth is left out of the picture."""
    shown = sorted(values)[: max(1, int(len(values) * 0.99))]
    if not shown:
        return ""
    most = shown[-1] or 1.0
    counts = [0] * bins
    for value in shown:
        counts[min(bins - 1, int(value / most * bins))] += 1
    top = max(counts)
    width = (WIDTH - 2 * MARGIN) / bins
    bars = "".join(
        f'<rect x="{MARGIN + i * width:.1f}" y="{_y(n / top):.1f}" width="{width - 1:.1f}" '
        f'height="{_y(0) - _y(n / top):.1f}" fill="{BLUE}"/>'
        for i, n in enumerate(counts)
    )
    return _chart(bars, f"{top:,} jobs", f"{most:,.0f} ms")


def stacked(outcomes: list[tuple[str, int, int, int]]) -> str:
    """Done at once, done after a retry, dead: a bar for each name."""
    top = max((sum(row[1:]) for row in outcomes), default=1) or 1
    parts, height = [], 34
    for place, (name, *counts) in enumerate(outcomes):
        y, x = 10 + place * height, 120.0
        parts.append(f'<text x="110" y="{y + 16}" text-anchor="end">{html.escape(name)}</text>')
        for count, colour in zip(counts, (GREEN, BLUE, RED), strict=True):
            width = count / top * (WIDTH - 320)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{colour}"/>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{counts[0]:,} / {counts[1]:,} / {counts[2]:,}</text>')
    below = 10 + len(outcomes) * height
    legend = _legend([("at once", GREEN), ("after a retry", BLUE), ("dead", RED)], below + 14)
    return _svg("".join(parts) + legend, below + 28)


def _x(share: float) -> float:
    return MARGIN + share * (WIDTH - 2 * MARGIN)


def _y(share: float) -> float:
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)


def _legend(entries: list[tuple[str, str]], y: float = 18) -> str:
    return "".join(
        f'<rect x="{120 + i * 150}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{138 + i * 150}" y="{y}">{label}</text>'
        for i, (label, colour) in enumerate(entries)
    )


def _chart(inside: str, top: str, right: str) -> str:
    axes = (
        f'<path d="M{MARGIN},{MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}" fill="none" stroke="{INK}"/>'
        f'<text x="{MARGIN}" y="{MARGIN - 8}">{top}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - MARGIN + 18}" text-anchor="end">{right}</text>'
    )
    return _svg(axes + inside, HEIGHT)


def _svg(inside: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" font-size="12" fill="{INK}">{inside}</svg>'
