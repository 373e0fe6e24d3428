"""What all readers share: the queues that were asked for, and connections, one pool for each process and server.

Spark keeps Python workers from task to task, so a Reader is kept too, by what it takes to connect. Nothing is opened
before the first read, and a Reader whose use ended in an error is closed and dropped: the next read starts afresh.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from chasqui import OptionError
from chasqui.bridge import ConnectionOptions, Reader, checked_queue, spell
from chasqui_spark.options import STREAMED_VIEWS, SourceOptions, connection_of

_pool: dict[ConnectionOptions, Reader] = {}
_lock = threading.Lock()
# A pattern may match everything; an offset with so many queues would be too large to log with every batch.
MAX_QUEUES = 10_000


@contextmanager
def reading(options: ConnectionOptions) -> Iterator[Reader]:
    """A Reader of this process, for as long as the block lasts."""
    key = connection_of(options)
    with _lock:
        reader = _pool.get(key)
        if reader is None:
            reader = _pool[key] = Reader(key)
    try:
        yield reader
    except GeneratorExit:
        # Nobody wants the rest (LIMIT): the connection is between two commands, and stays.
        raise
    except BaseException:
        with _lock:
            if _pool.get(key) is reader:
                del _pool[key]
        reader.close()
        raise


def close_all() -> None:
    """Close this process's connections; later reads open new ones."""
    with _lock:
        readers = list(_pool.values())
        _pool.clear()
    for reader in readers:
        reader.close()


def named_queues(options: SourceOptions) -> list[str] | None:
    """The queues of ``queue`` or ``queues``, checked, each once, sorted; None where a pattern decides."""
    if options.queue_pattern is not None:
        _check_pattern(options.queue_pattern)
        return None
    if options.queue is not None:
        return [_checked("queue", options.queue)]
    names = [name.strip() for name in (options.queues or "").split(",")]
    if not any(names):
        raise OptionError(f"queues expects names, separated by commas; got {options.queues!r:.80}")
    found = sorted({_checked("queues", name) for name in names if name})
    if len(found) > MAX_QUEUES:
        raise OptionError(f"queues expects at most {MAX_QUEUES} names, got {len(found)}")
    return found


def _checked(option: str, name: str) -> str:
    try:
        return checked_queue(name)
    except ValueError as error:
        raise OptionError(f"{option}: {getattr(error, 'message', error)}") from None


def _check_pattern(pattern: str) -> None:
    size = len(pattern.encode(errors="surrogatepass"))
    if (
        not pattern.strip()
        or any(c in "{}" or ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF for c in pattern)
        or size > 256
    ):
        raise OptionError(
            f"{spell('queue_pattern', 'spark')} expects a glob such as mail-*, of at most 256 bytes, without braces; "
            f"got {pattern!r:.80}"
        )


def found_queues(options: SourceOptions, reader: Reader) -> list[str]:
    """The queues to read now."""
    named = named_queues(options)
    if named is not None:
        return named
    found = reader.discover(str(options.queue_pattern))
    if len(found) > MAX_QUEUES:
        raise OptionError(
            f"queuePattern {options.queue_pattern!r} matches {len(found)} queues, more than {MAX_QUEUES}: narrow it"
        )
    return found


def check_server(options: SourceOptions) -> None:
    """Fail now, and not in the first task, where the server cannot be reached, refuses us, or has something else under
    a queue's name. One quick try on a connection of its own: waiting out an outage is for queries that run.
    """
    from chasqui_spark.offsets import check_start

    check_start(options)
    named = named_queues(options)
    with Reader(replace(connection_of(options), reconnect_attempts=min(1, options.reconnect_attempts))) as reader:
        # Of a pattern's queues only some are looked at: the search for all is the query's.
        queues = reader.some(str(options.queue_pattern)) if named is None else named
        reader.check(options.view, queues, options.group)
        if options.view in STREAMED_VIEWS and queues:
            reader.positions(options.view, queues[:1])
