"""Sources for comparison only: the same reader yielding Python rows, and one that notes its worker's peak memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from chasqui.bridge import job_columns
from chasqui_spark import ChasquiDataSource
from chasqui_spark.options import source_options
from chasqui_spark.planning import RangePartition
from chasqui_spark.source import reading
from chasqui_spark.stream_reader import StreamReader


class RowSource(ChasquiDataSource):
    @classmethod
    def name(cls) -> str:
        return "chasqui_rows"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        return _RowReader(source_options(self.options, streaming=True), schema)


class _RowReader(StreamReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, RangePartition)
        with reading(self._options) as reader:
            for r in partition.ranges:
                for page in reader.pages("jobs", r.queue, r.after, r.upto):
                    jobs = job_columns(page)
                    for i, (entry_id, _) in enumerate(page):
                        text = entry_id.decode()
                        yield (
                            r.queue,
                            text,
                            jobs.ids[i],
                            jobs.names[i].decode(),  # type: ignore[union-attr]
                            jobs.payloads[i],
                            datetime.fromtimestamp(jobs.created_ms[i] / 1000, UTC),  # type: ignore[operator]
                            datetime.fromtimestamp(int(text.partition("-")[0]) / 1000, UTC),
                            jobs.attempts[i],
                            None,
                            None,
                        )


class MeasuredSource(ChasquiDataSource):
    @classmethod
    def name(cls) -> str:
        return "chasqui_measured"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        return _MeasuredReader(source_options(self.options, streaming=True), schema)


class _MeasuredReader(StreamReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield from super().read(partition)
        note = os.environ.get("CHASQUI_BENCH_NOTE")
        if note:
            Path(note).write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
