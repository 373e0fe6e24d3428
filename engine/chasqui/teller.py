"""Events written from a thread of their own, in order, so that neither handlers nor outcomes wait for them.

Killed: what was not written is missing, as events of the last moments may be. Server slow: with ``_MOST`` calls not
written yet ``tell`` waits, so memory stays bounded. Server gone: those events are given up, and the next are tried.
"""

from __future__ import annotations

import logging
import queue
import threading

from chasqui.errors import ChasquiError
from chasqui.protocol import events
from chasqui.protocol.events import Alike, Line
from chasqui.protocol.keys import Keys
from chasqui.redis_io import Link

log = logging.getLogger("chasqui.outcomes")

_MOST = 4


class Teller:
    """One FIFO of events of one queue, for one writer. A context manager: all is written when the block ends."""

    def __init__(self, link: Link, keys: Keys, max_len: int) -> None:
        self._link, self._keys, self._max_len = link, keys, max_len
        self._waiting: queue.Queue[Alike | list[Line] | None] = queue.Queue(_MOST)
        self._thread = threading.Thread(target=self._write_all, name="chasqui-events", daemon=True)

    def __enter__(self) -> Teller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def tell(self, lines: Alike | list[Line]) -> None:
        """Write these after all that were told before."""
        self._waiting.put(lines)

    def _write_all(self) -> None:
        while (lines := self._waiting.get()) is not None:
            write(self._link, self._keys, lines, self._max_len)


def write(link: Link, keys: Keys, lines: Alike | list[Line], max_len: int) -> None:
    """Write events now. Best effort: what the server does not take is logged and gone."""
    try:
        link.run(events.write(keys, lines, max_len))
    except ChasquiError as error:
        log.warning("%d events were not written: %s", len(lines), error.message)
