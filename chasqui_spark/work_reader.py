"""Claimed jobs that are worked on where they are read: what leaves the task is a row a job, saying whether it is done.

Handing the jobs to Spark and back to a second Python process for the handler would cost more than all the rest.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.datasource import InputPartition

from chasqui import ConfigError
from chasqui.bridge import Outcomes
from chasqui_spark.consume_reader import ConsumeReader
from chasqui_spark.handling import Handling
from chasqui_spark.links import link_of
from chasqui_spark.options import SourceOptions
from chasqui_spark.reports import Reports
from chasqui_spark.views import schema_of

COLUMNS = "done boolean"
_SCHEMA = pa.schema([pa.field("done", pa.bool_())])


class WorkReader(ConsumeReader):
    """Takes jobs as ``ConsumeReader`` does; its tasks run a handler on them and settle every job by itself.

    Killed at any point: what was settled is settled, the rest is run again.
    """

    _lingers_s = 0.0  # jobs are run by the task that reads them

    def __init__(self, options: SourceOptions, packed: bytes) -> None:
        super().__init__(options, schema_of(options))
        self._packed = packed

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        handling = unpacked(self._packed)
        options = self._options
        # The server and this process take turns working: what becomes of jobs is told while the next ones are read and
        # run. A task ends well only when all of it has arrived.
        with (
            self._task(partition) as (jobs, pieces),
            Reports(Outcomes(link_of(options), jobs.queue, options, jobs.consumer)) as reports,
        ):
            for done in handling.run(self._rows(jobs, pieces), reports):
                yield pa.record_batch([pa.array(done, pa.bool_())], schema=_SCHEMA)


_cloudpickle: Any = cloudpickle


def packed(handling: Handling) -> bytes:
    """A handler as Spark ships functions. Only tasks unpack it: what it imports need not be there for planning."""
    try:
        return cast(bytes, _cloudpickle.dumps(handling))
    except Exception as error:
        raise ConfigError(
            f"handler cannot be sent to executors ({type(error).__name__}: {error}): open connections, locks and files "
            f"inside of it, and use no SparkSession or DataFrame there"
        ) from error


def unpacked(data: bytes) -> Handling:
    return cast(Handling, pickle.loads(data))  # noqa: S301 (it comes from this program's driver)
