"""The sink's page shows the options as they are declared."""

from __future__ import annotations

from pathlib import Path

from chasqui.bridge import table
from chasqui_spark.options import SinkOptions

PAGE = Path(__file__).parents[2] / "docs" / "spark-sink.md"


def test_the_table_of_options_is_that_of_the_declarations() -> None:
    assert table(SinkOptions, "spark") in PAGE.read_text(encoding="utf-8")
