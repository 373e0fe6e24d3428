"""All rows of ``make bench``, by name. What a row measures is its function's docstring; the page shows it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from benchmarks import producer, spark_consume, spark_sink, spark_source, worker
from benchmarks.harness import Row

ROWS: dict[str, Callable[[], Row]] = {
    **producer.ROWS,
    **worker.ROWS,
    **spark_sink.ROWS,
    **spark_source.ROWS,
    **spark_consume.ROWS,
}


def meaning(name: str) -> str:
    """What the row of that name measures, in one line."""
    return " ".join((inspect.getdoc(ROWS[name]) or "").split())
