"""Job queues as DataFrames: the format ``chasqui`` for reading and writing, and Spark as a worker pool.

Nothing is imported before it is used: Spark imports this package in every planning process, also for queries that have
nothing to do with it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("pyspark") is None:
    raise ImportError("chasqui_spark needs PySpark 4.2 or newer: pip install 'chasqui-spark[spark]'")

if TYPE_CHECKING:
    from chasqui_spark.datasource import ChasquiDataSource, register
    from chasqui_spark.handling import arrow_batch
    from chasqui_spark.listener import ChasquiQueryListener
    from chasqui_spark.sink import ChasquiSink
    from chasqui_spark.worker_pool import worker

_HOMES = {
    "ChasquiDataSource": "datasource",
    "ChasquiQueryListener": "listener",
    "ChasquiSink": "sink",
    "register": "datasource",
    "arrow_batch": "handling",
    "worker": "worker_pool",
}

__all__ = ["ChasquiDataSource", "ChasquiQueryListener", "ChasquiSink", "arrow_batch", "register", "worker"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
