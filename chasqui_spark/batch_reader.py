"""``spark.read.format("chasqui")``: what stands in the queues when the query is planned."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from chasqui import WrongKeyType
from chasqui.bridge import Position, id_parts
from chasqui_spark.listings import listed
from chasqui_spark.offsets import check_start, end_of, first_look, resolved, start_of, warning_of
from chasqui_spark.options import STREAMED_VIEWS, SourceOptions
from chasqui_spark.planning import QueuesPartition, Range, RangePartition
from chasqui_spark.pushdown import Narrowed, narrowed
from chasqui_spark.ranges import planned, read_ranges
from chasqui_spark.rows import Rows
from chasqui_spark.source import found_queues, named_queues, reading
from chasqui_spark.views import check_schema
from chasqui_spark.worker_logs import show_logs

log = logging.getLogger("chasqui.spark")


class BatchReader(DataSourceReader):
    """Made in several processes, so making it does nothing; ``partitions`` runs on the driver, ``read`` in tasks."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(options, schema)
        check_start(options)
        named_queues(options)
        self._options = options
        self._narrowed = Narrowed()

    def partitions(self) -> Sequence[InputPartition]:
        show_logs()
        options = self._options
        with reading(options) as reader:
            queues = [queue for queue in found_queues(options, reader) if self._narrowed.wants(queue)]
            if options.view not in STREAMED_VIEWS:
                return [QueuesPartition([queue]) for queue in queues] or [QueuesPartition([])]
            positions = there(reader.positions(options.view, queues))
            ranges = [r for r in (self._range(q, p) for q, p in positions.items()) if r is not None]
            return list(planned(options, reader, ranges, positions, {})) or [RangePartition([])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """A generator of record batches."""
        if isinstance(partition, RangePartition):
            return read_ranges(self._options, partition.ranges)
        return self._read_lists(partition.queues if isinstance(partition, QueuesPartition) else ())

    def _read_lists(self, queues: Sequence[str]) -> Iterator[pa.RecordBatch]:
        rows = Rows(self._options)
        with reading(self._options) as reader:
            for queue in queues:
                yield from listed(self._options, rows, reader, queue)

    def _range(self, queue: str, position: Position) -> Range | None:
        """From start to end as asked for, both settled now, less what filters exclude."""
        found = first_look(start_of(self._options), queue, position)
        if found.lost is not None:
            log.warning("%s", warning_of(self._options, queue, found.lost))
        begin = found.begin
        end = resolved(end_of(self._options).of(queue), position)
        if id_parts(end) > id_parts(position.last_id):
            end = position.last_id
        begin, end = self._narrowed.bounds(begin, end, position)
        if not position.length or id_parts(begin) >= id_parts(end):
            return None
        return Range(queue, begin, end, position.length)


class PushdownReader(BatchReader):
    """The same, told of filters. Spark 4.3 refuses a reader with this method while its push-down is switched off."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 (Spark's name)
        """Note what narrows the range of ids. All filters go back: Spark still checks every row."""
        self._narrowed = narrowed(filters)
        return iter(filters)


def batch_reader(options: SourceOptions, schema: StructType) -> BatchReader:
    return (PushdownReader if options.filter_pushdown else BatchReader)(options, schema)


def there(positions: dict[str, Position | WrongKeyType]) -> dict[str, Position]:
    """Those positions, or the error of the first key that is no stream."""
    for one in positions.values():
        if isinstance(one, WrongKeyType):
            raise one
    return {queue: one for queue, one in positions.items() if isinstance(one, Position)}
