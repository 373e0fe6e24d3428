"""Making our log lines visible in the Python processes that Spark starts.

Nobody configures logging there, and a library's lines would go nowhere; Spark passes on what they write to stderr.
"""

from __future__ import annotations

import logging
import sys


def show_logs() -> None:
    """Write to stderr, unless somebody handles our lines already, as Spark does when its worker logging is on."""
    ours = logging.getLogger("chasqui")
    handlers = [*ours.handlers, *logging.getLogger().handlers]
    if all(isinstance(handler, logging.NullHandler) for handler in handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
