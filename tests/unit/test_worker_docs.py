"""The page on Spark as a worker pool shows the options as they are declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chasqui.bridge import table
from chasqui_spark.options import ReplayOptions, SettleOptions

PAGE = Path(__file__).parents[2] / "docs" / "spark-worker.md"


@pytest.mark.parametrize("options", [SettleOptions, ReplayOptions])
def test_the_tables_of_options_are_those_of_the_declarations(options: type[Any]) -> None:
    assert table(options, "spark") in PAGE.read_text(encoding="utf-8")
