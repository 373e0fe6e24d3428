"""Columns that every view has."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from chasqui_spark.rows import times

LAST = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        ([253_402_300_799_999, 0, None], [LAST, datetime(1970, 1, 1, tzinfo=UTC), None]),
        ([253_402_300_800_000, 0], [None, datetime(1970, 1, 1, tzinfo=UTC)]),
        ([-62_135_596_800_000], [datetime(1, 1, 1, tzinfo=UTC)]),
        ([-62_135_596_800_001, 2**63, 2**64 - 1], [None, None, None]),
        ([None], [None]),
        ([], []),
    ],
)
def test_times_that_spark_has_no_timestamp_for_are_null(ms: list[int | None], expected: list[datetime | None]) -> None:
    assert times(ms).to_pylist() == expected
