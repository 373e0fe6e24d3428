"""What queries tell while they run: lag as metrics, and committed batches to whoever waits for them.

Spark posts a progress event after a batch is in the commit log, on a thread of its own. What the source reported then
(``reportLatestOffset``) stands in it, so the listener asks no server.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from chasqui import ConfigError, PrometheusSink, Stats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress

log = logging.getLogger("chasqui.spark")

Told = Callable[["StreamingQueryProgress"], None]
Ended = Callable[[str, bool], None]

_attached: WeakKeyDictionary[Any, ChasquiQueryListener] = WeakKeyDictionary()
_lock = threading.Lock()


class ChasquiQueryListener(StreamingQueryListener):
    """Turns the progress of queries that read queues into figures, and passes committed batches on.

    ``figures`` holds the last figures of each queue that any query has read. With ``prometheus-client`` installed the
    gauges ``chasqui_queue_depth`` and ``chasqui_queue_oldest_age_seconds`` show them too, in ``registry`` or the
    default one. ``on_committed`` and ``on_ended`` register functions to be called with the progress of each finished
    batch, and with the run id of each query that ended and whether it failed; what they raise is logged and hurts
    nobody.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.figures: dict[str, Stats] = {}
        self._registry = registry
        self._sinks: dict[str, PrometheusSink | None] = {}
        self._committed: list[Told] = []
        self._ended: list[Ended] = []

    def on_committed(self, call: Told) -> None:
        self._committed.append(call)

    def on_ended(self, call: Ended) -> None:
        self._ended.append(call)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 (Spark's name)
        """Nothing is known yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """A batch is in the commit log."""
        for call in list(self._committed):
            _guarded(call, event.progress)
        for source in event.progress.sources:
            for queue, stats in figures_of(source.latestOffset).items():
                self.figures[queue] = stats
                _guarded(self._publish, queue, stats)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Nothing new; the figures of the last batch stand."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """No more progress will come from this run."""
        for call in list(self._ended):
            _guarded(call, str(event.runId), event.exception is not None)

    def _publish(self, queue: str, stats: Stats) -> None:
        if queue not in self._sinks:
            self._sinks[queue] = _sink(queue, self._registry)
        sink = self._sinks[queue]
        if sink is not None:
            sink.update_stats(stats)


def attach(spark: SparkSession) -> ChasquiQueryListener:
    """The listener of this session: added at the first call, the same one at every later call."""
    with _lock:
        found = _attached.get(spark)
        if found is None:
            found = ChasquiQueryListener()
            spark.streams.addListener(found)
            _attached[spark] = found
        return found


def figures_of(reported: Any) -> dict[str, Stats]:
    """The figures that a source of ours has put into the progress; none in what other sources report.

    Text in classic Spark, parsed already over Connect.
    """
    try:
        found = json.loads(reported) if isinstance(reported, str) else reported
        queues = found["queues"] if isinstance(found, dict) and "v" in found else {}
        return {
            str(queue): Stats(
                waiting=int(one["waiting"]),
                pending=int(one["pending"]),
                delayed=int(one["delayed"]),
                dlq=int(one["dlq"]),
                oldest_age_ms=int(one["oldest_age_ms"]),
                paused=bool(one["paused"]),
            )
            for queue, one in queues.items()
            if isinstance(one, dict) and "oldest_age_ms" in one
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _sink(queue: str, registry: CollectorRegistry | None) -> PrometheusSink | None:
    try:
        return PrometheusSink(queue, registry)
    except ConfigError:  # prometheus-client is not installed
        return None


def _guarded(call: Callable[..., None], *args: Any) -> None:
    """Spark drops a listener's other work when one call raises; ours are independent of each other."""
    try:
        call(*args)
    except Exception:
        log.exception("a listener of streaming queries failed")
