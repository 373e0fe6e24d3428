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

_QUICK_MS = 2000

_settlers: WeakKeyDictionary[ChasquiQueryListener, set[ConnectionOptions]] = WeakKeyDictionary()
_lock = threading.Lock()


class Committed:
    """What a listener does for queries of ``mode=consume`` on one server."""

    def __init__(self, connection: ConnectionOptions) -> None:
        # Listeners share one thread: better to leave a batch to the source than to hold the others up.
        self._connection = replace(
            connection,
            reconnect_attempts=1,
            connect_timeout_ms=min(_QUICK_MS, connection.connect_timeout_ms),
            socket_timeout_ms=min(_QUICK_MS, connection.socket_timeout_ms),
        )
        self._foreign: set[str] = set()
        self._unsettled: dict[str, set[tuple[str, str, int]]] = {}

    def committed(self, progress: StreamingQueryProgress) -> None:
        """A batch is in the commit log. What was in there before it the source has settled."""
        run = str(progress.runId)
        found = [(source, end) for source in progress.sources if (end := is_ours(source.endOffset)) is not None]
        (self._foreign.discard if found else self._foreign.add)(run)
        new = {
            (queue, str(end.sid), number)
            for source, end in found
            for queue, number in batches(is_ours(source.startOffset) or ConsumeOffset(), end)
        }
        if new:
            self._unsettled[run] = new
            self._settle(new)

    def _settle(self, unsettled: set[tuple[str, str, int]]) -> None:
        for queue, sid, number in sorted(unsettled):
            try:
                settle_batch(link_of(self._connection), queue, sid, number)
                unsettled.discard((queue, sid, number))
            except ChasquiError as error:
                log.warning("batch %d of queue %r is left to the source to settle: %s", number, queue, error.message)

    def ended(self, run: str, failed: bool) -> None:
        """The run has ended, and every commit of it was heard of before. A query that only reads writes nothing, not
        even this; one that ended before its first batch could be either, and is told.

        A stopped query gives its jobs back, so it is told of a stop only when what it has committed is settled.
        """
        unsettled = self._unsettled.pop(run, set())
        if run in self._foreign:
            self._foreign.discard(run)
            return
        try:
            self._settle(unsettled)
            tell_ended(link_of(self._connection), run, failed=failed or bool(unsettled))
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
