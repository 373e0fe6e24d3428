"""Python's search for cyclic garbage, kept away from loops that make none.

A page is thousands of small lists that all die with it and hold no cycles; looking through them at every turn took a
third of the time. And Spark's workers look through all they have after each task: the modules of Spark, Arrow and this
package alone are 75 ms of that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_froze = False


@contextmanager
def paused() -> Iterator[None]:
    """No search until the block ends."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def resumed() -> Iterator[None]:
    """Inside ``paused``: code of others runs here, and it may make cycles."""
    gc.enable()
    try:
        yield
    finally:
        gc.disable()


def freeze_once() -> None:
    """Leave what is alive now out of all later searches. For Spark's Python workers, at the end of their first task."""
    global _froze
    if not _froze:
        _froze = True
        gc.collect()
        gc.freeze()
