"""Settling from the listener: a batch is settled milliseconds after Spark has committed it, whatever the trigger.

The listener runs in the user's program, the source in a process of its own. What the two share is the offset in the
query's progress, which has the sid and the batch's number, and the server, where the sid's session says how its jobs
are settled. The address of the server is in neither: it is given where the listener is attached.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from chasqui import ChasquiError
from chasqui.bridge import ConnectionOptions, settle_batch, tell_ended
from chasqui_spark.consume_offsets import ConsumeOffset, batches, is_ours
from chasqui_spark.links import link_of
from chasqui_spark.listener import ChasquiQueryListener
from chasqui_spark.options import connection_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

log = logging.getLogger("chasqui.spark")

_settlers: WeakKeyDictionary[ChasquiQueryListener, set[ConnectionOptions]] = WeakKeyDictionary()
_lock = threading.Lock()


class Committed:
    """What a listener does for queries of ``mode=consume`` on one server."""

    def __init__(self, connection: ConnectionOptions) -> None:
        # Listeners share one thread: better to leave a batch to the source than to hold the others up.
        quick = min(2000, connection.connect_timeout_ms)
        self._connection = replace(connection, reconnect_attempts=1, connect_timeout_ms=quick)
        self._foreign: set[str] = set()

    def committed(self, progress: StreamingQueryProgress) -> None:
        """A batch is in the commit log."""
        found = [(source, end) for source in progress.sources if (end := is_ours(source.endOffset)) is not None]
        (self._foreign.discard if found else self._foreign.add)(str(progress.runId))
        for source, end in found:
            self._settle(is_ours(source.startOffset) or ConsumeOffset(), end)

    def _settle(self, start: ConsumeOffset, end: ConsumeOffset) -> None:
        for queue, number in batches(start, end):
            try:
                settle_batch(link_of(self._connection), queue, str(end.sid), number)
            except ChasquiError as error:
                log.warning("batch %d of queue %r is left to the source to settle: %s", number, queue, error.message)

    def ended(self, run: str, failed: bool) -> None:
        """The run has ended, and every commit of it was heard of before. A query that only reads writes nothing, not
        even this; one that ended before its first batch could be either, and is told.
        """
        if run in self._foreign:
            self._foreign.discard(run)
            return
        try:
            tell_ended(link_of(self._connection), run, failed=failed)
        except ChasquiError as error:
            log.info("the source was not told of the end: %s", error.message)


def settle_from(listener: ChasquiQueryListener, options: ConnectionOptions) -> None:
    """Have the listener settle batches of that server; once, however often it is asked."""
    connection = connection_of(options)
    with _lock:
        known = _settlers.setdefault(listener, set())
        if connection in known:
            return
        known.add(connection)
    one = Committed(connection)
    listener.on_committed(one.committed)
    listener.on_ended(one.ended)
