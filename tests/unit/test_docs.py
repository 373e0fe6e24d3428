"""The documents that are made from declarations are fresh, and the ones that name calls name real ones."""

from __future__ import annotations

import re
from pathlib import Path

import chasqui
from benchmarks import report
from docs.generate import readme, text

DOCS = Path(__file__).parents[2] / "docs"


def test_the_option_tables_are_those_of_the_declarations() -> None:
    assert (DOCS / "options.md").read_text() == text(), "stale: run make docs"
    now = (DOCS.parent / "README.md").read_text()
    assert now == readme(now), "stale: run make docs"


def test_every_producer_call_in_the_api_map_exists() -> None:
    producer = (DOCS / "rust-api.md").read_text().split("## Producer")[1].split("## Values")[0]
    python_column = [row.split("|")[2] for row in producer.splitlines() if row.startswith("| ") and "---" not in row]

    calls = {name for cell in python_column for name in re.findall(r"`(\w+)\(", cell)} - {"Producer", "NewJob"}

    assert len(calls) > 15
    assert [name for name in sorted(calls) if not hasattr(chasqui.Producer, name) and not hasattr(chasqui, name)] == []


def test_every_public_producer_call_is_in_the_api_map() -> None:
    mapped = (DOCS / "rust-api.md").read_text()
    public = [name for name in vars(chasqui.Producer) if not name.startswith("_") and name != "close"]

    assert [name for name in public if name not in mapped] == []


def test_the_figures_are_those_of_the_last_committed_run() -> None:
    results = report.load()

    assert (DOCS / "benchmarks.md").read_text() == report.page(results), "stale: python -m benchmarks.report"
    assert (DOCS / "benchmarks.svg").read_text() == report.plot(results["rows"])
    readme = report.README.read_text()
    assert readme == report.readme(readme, results["rows"])
