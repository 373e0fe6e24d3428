"""Connections that change queues, one pool for each process and server: Spark keeps Python workers from task to
task.
"""

from __future__ import annotations

import threading

from chasqui.bridge import ConnectionOptions, Link
from chasqui_spark.options import connection_of

_links: dict[ConnectionOptions, Link] = {}
_lock = threading.Lock()


def link_of(options: ConnectionOptions) -> Link:
    """This process's connections to that server; opened at the first use."""
    key = connection_of(options)
    with _lock:
        if key not in _links:
            _links[key] = Link(key)
        return _links[key]
