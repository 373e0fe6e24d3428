"""``python -m benchmarks [--rows a,b]``: run the rows, print the table, write results/latest.json and its page."""

from __future__ import annotations

import argparse
import sys

from benchmarks import report
from benchmarks.harness import Row, machine, save, show
from benchmarks.rows import ROWS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", default="", help=f"comma list; known: {', '.join(ROWS)}")
    chosen = [name for name in parser.parse_args().rows.split(",") if name] or list(ROWS)
    unknown = [name for name in chosen if name not in ROWS]
    if unknown:
        parser.error(f"unknown rows {', '.join(unknown)}; known: {', '.join(ROWS)}")
    about = machine()
    rows: list[Row] = []
    for name in chosen:
        print(f"running {name} ...", flush=True)
        rows.append(ROWS[name]())
    show(rows)
    save(rows, about)
    report.write()
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
