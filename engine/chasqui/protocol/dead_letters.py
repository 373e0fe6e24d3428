"""Dead letters: look, replay, purge. Walks in pages, so that a long list is never held at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chasqui.errors import DecodeError, QueueFull
from chasqui.job import DlqEntry
from chasqui.payload import PayloadCodec
from chasqui.protocol.codec import decode_envelope, encode_envelope
from chasqui.protocol.flow import Arg, Batch, Command, Flow, call_script, command, values
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import dlq_entry, fields, number
from chasqui.protocol.scripts import SCRIPT_BYTES, script

PAGE = 100


def peek(keys: Keys, codec: PayloadCodec, limit: int, after: str | None = None) -> Flow[list[DlqEntry]]:
    """The oldest entries, or those after an id."""
    start = f"({after}" if after else "-"
    entries = yield command("XRANGE", keys.dlq, start, "+", "COUNT", limit, safe=True)
    return [dlq_entry(entry, codec) for entry in entries]


def replay(keys: Keys, limit: int, ids: Sequence[str] | None, cap: int, trim: int) -> Flow[int]:
    """Move entries back to the stream with attempt 0, oldest first; entries that are no jobs stay and are passed over.

    Each page is one script call that removes and adds in one step, so it may be sent again after a lost reply: what
    was moved is no longer there to be moved twice. The count may then be too low, never the work.
    """
    moved = 0
    pages = _Pages(keys, ids)
    page = yield from _next(pages)
    while page and moved < limit:
        for args in _replayable(page, limit - moved):
            reply = yield from call_script(
                script("replay_dead_letters"), [keys.dlq, keys.stream], [cap, trim, *args], safe=True
            )
            moved += number(reply[0])
            if number(reply[1]):
                raise QueueFull(
                    f"queue {keys.queue!r} is full ({cap} jobs): {moved} dead letters were replayed, the others stay "
                    f"where they are; let workers drain it, or raise max_stream_len"
                )
        page = yield from _next(pages)
    return moved


def _replayable(page: list[Any], limit: int) -> Iterator[list[Arg]]:
    """The script's arguments for the first entries that are jobs, in calls of at most about ``SCRIPT_BYTES``."""
    args: list[Arg] = []
    size = chosen = 0
    for entry_id, flat in page:
        if chosen == limit:
            break
        found = fields(flat)
        try:
            envelope = encode_envelope(decode_envelope(found.get(b"d", b"")).with_attempt(0))
        except DecodeError:
            continue
        if args and size + len(envelope) > SCRIPT_BYTES:
            yield args
            args, size = [], 0
        args += [entry_id, envelope, found.get(b"n", b"")]
        size += len(envelope)
        chosen += 1
    if args:
        yield args


def purge(keys: Keys, limit: int | None, ids: Sequence[str] | None) -> Flow[int]:
    """Delete entries, oldest first; without limit all that are there now."""
    removed = 0
    pages = _Pages(keys, ids)
    page = yield from _next(pages)
    while page and (limit is None or removed < limit):
        chosen = [entry[0] for entry in page]
        if limit is not None:
            chosen = chosen[: limit - removed]
        removed += number((yield Command(("XDEL", keys.dlq, *chosen), safe=True)))
        page = yield from _next(pages)
    return removed


class _Pages:
    """Where a walk stands: through the chosen ids, or through everything up to the newest entry at its start."""

    def __init__(self, keys: Keys, ids: Sequence[str] | None) -> None:
        self.keys = keys
        self.ids: Iterator[str] | None = None if ids is None else iter(list(ids))
        self.start = "-"
        self.end: str | bytes | None = None


def _next(pages: _Pages) -> Flow[list[Any]]:
    """The next page of entries; empty at the end."""
    dlq = pages.keys.dlq
    if pages.ids is not None:
        found: list[Any] = []
        while not found:
            chosen = [i for _, i in zip(range(PAGE), pages.ids, strict=False)]
            if not chosen:
                return []
            replies = yield Batch(tuple(command("XRANGE", dlq, i, i, safe=True) for i in chosen))
            found = [entry for reply in values(replies) for entry in reply]
        return found
    if pages.end is None:
        newest = yield command("XREVRANGE", dlq, "+", "-", "COUNT", 1, safe=True)
        if not newest:
            return []
        pages.end = newest[0][0]
    entries: list[Any] = yield command("XRANGE", dlq, pages.start, pages.end or "+", "COUNT", PAGE, safe=True)
    if entries:
        pages.start = "(" + entries[-1][0].decode()
    return entries
