"""What programs for spark-submit share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from chasqui_spark.pipeline import Counted


@dataclass
class Progress:
    batchId: int  # noqa: N815 (Spark's name)
    numInputRows: int  # noqa: N815


class Query:
    """As a query tells of itself: its last three batches, and those to come that have no rows yet."""

    def __init__(self, *steps: list[tuple[int, int]]) -> None:
        self._steps = list(steps)
        self.recentProgress: Any = deque(maxlen=3)

    def awaitTermination(self, timeout: float) -> bool:  # noqa: N802
        if not self._steps:
            return True
        self.recentProgress += [Progress(*told) for told in self._steps.pop(0)]
        return False


def test_rows_are_counted_beyond_the_batches_that_spark_remembers() -> None:
    told: list[int] = []

    rows = Counted(Query([(0, 5), (1, 5)], [(2, 7), (3, 1), (4, 1)], [(5, 2)])).finish(0, told.append)  # type: ignore[arg-type]

    assert rows == 21
    assert told == [10, 19, 21]


def test_a_batch_told_before_it_has_rows_and_again_is_counted_once() -> None:
    query = Query([(0, 0)], [(0, 0), (0, 4)], [(0, 4), (1, 0)])

    assert Counted(query).finish(0) == 4  # type: ignore[arg-type]


def test_a_query_that_runs_for_months_takes_no_memory() -> None:
    query = Query(*([(batch, 1)] for batch in range(5000)))
    counted = Counted(query)  # type: ignore[arg-type]

    assert counted.finish(0) == 5000
    assert len(counted._seen) <= 1000
