"""Sources for comparison only: the same reader yielding Python rows, and one that notes its worker's peak memory.

The row path is what a source without record batches would do: it decodes job by job and yields a tuple for each, with
Python's collector as Spark leaves it.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from chasqui.bridge import entry_fields
from chasqui.protocol.codec import decode_fields, decode_name
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
        gc.unfreeze()
        with reading(self._options) as reader:
            for r in partition.ranges:
                for page in reader.pages("jobs", r.queue, r.after, r.upto):
                    for entry_id, flat in page:
                        yield _row(r.queue, entry_id.decode(), entry_fields(flat))
        gc.freeze()


def _row(queue: str, entry_id: str, found: dict[bytes, bytes]) -> tuple[Any, ...]:
    job_id, payload, created_ms, attempt, _, _ = decode_fields(found[b"d"])
    created = datetime.fromtimestamp(created_ms / 1000, UTC)
    enqueued = datetime.fromtimestamp(int(entry_id.partition("-")[0]) / 1000, UTC)
    return queue, entry_id, job_id, decode_name(found.get(b"n")), payload, created, enqueued, attempt, None, None


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
