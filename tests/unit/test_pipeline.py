"""What programs for spark-submit share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException

from chasqui import ConnectionLost, DataLoss, OptionError, QueueFull
from chasqui_spark.pipeline import FAILED, MISTAKE, REFUSED, UNREACHABLE, Counted, interval, trigger, verdict


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


OUTAGE = """[PYTHON_DATA_SOURCE_ERROR] Failed when using Python data source: Traceback (most recent call last):
  File "redis_io.py", line 177, in _connection
chasqui.errors.ConnectionLost: [CMQ-001] redis://127.0.0.1:1 cannot be reached: Connection refused.
 SQLSTATE: 38000"""


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (OptionError("queue expects"), (MISTAKE, "[CMQ-004] queue expects")),
        (ConnectionLost("gone"), (UNREACHABLE, "[CMQ-001] gone")),
        (QueueFull("full"), (REFUSED, "[CMQ-301] full")),
        (DataLoss("trimmed"), (FAILED, "[CMQ-308] trimmed")),
        (
            AnalysisException(OUTAGE),
            (UNREACHABLE, "[CMQ-001] redis://127.0.0.1:1 cannot be reached: Connection refused."),
        ),
        (StreamingQueryException("x chasqui.errors.AuthFailed: [CMQ-001] no\n"), (REFUSED, "[CMQ-001] no")),
        (AnalysisException("no column x;\n'Project [*]"), (MISTAKE, "no column x;")),
        (PythonException("Traceback (most recent call last):\nKeyError: 1"), None),
        (KeyError("defect"), None),
    ],
)
def test_an_error_has_its_exit_code_and_its_line(error: Exception, found: tuple[int, str] | None) -> None:
    assert verdict(error) == found


@pytest.mark.parametrize(
    ("given", "for_spark"), [("60s", "60000 milliseconds"), ("1.5m", "90000 milliseconds"), ("1 minute", "1 minute")]
)
def test_times_are_written_as_everywhere_or_as_spark_does(given: str, for_spark: str) -> None:
    assert interval(given) == for_spark
    assert trigger(given) == {"processingTime": for_spark}
    assert trigger(None) == {"availableNow": True}
