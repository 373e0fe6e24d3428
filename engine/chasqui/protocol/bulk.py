"""Bulk adds, written straight as protocol bytes.

The hot path of producers: the server works on the first piece while the next ones are still being written, and what is
common to jobs of the same name and size is made once. A script per chunk would be tidier, but calling XADD from Lua
costs the server twice what the bare command does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgpack

# Small enough that the server starts early, large enough that a send's overhead vanishes.
PIECE_JOBS = 64
PIECE_BYTES = 1 << 18
_ULID_BYTES = 26
_CREATED_BYTES = 9


@dataclass(frozen=True, slots=True)
class Bulk:
    """Jobs with ids of ours, all for the stream or all for the delayed set, in the order of the call.

    ``retries`` holds the packed override of each job, or nothing. ``run_at_ms`` is for the delayed set.
    """

    target: str
    created_at_ms: int
    ids: Sequence[str]
    payloads: Sequence[bytes]
    names: Sequence[bytes]
    retries: Sequence[bytes]
    run_at_ms: Sequence[int] | None
    trim: int

    def __len__(self) -> int:
        return len(self.ids)

    def only(self, numbers: Sequence[int]) -> Bulk:
        """The jobs with these numbers."""
        at = self.run_at_ms
        return replace(
            self,
            ids=[self.ids[i] for i in numbers],
            payloads=[self.payloads[i] for i in numbers],
            names=[self.names[i] for i in numbers],
            retries=[self.retries[i] for i in numbers],
            run_at_ms=None if at is None else [at[i] for i in numbers],
        )

    def pieces(self, start: int) -> Iterator[tuple[bytes, int]]:
        """Commands as bytes, and how many are in them, from job number ``start`` on."""
        created = msgpack.packb(self.created_at_ms) + b"\x00"
        frames: dict[tuple[bytes, int, bytes], tuple[bytes, bytes, bytes]] = {}
        at = self.run_at_ms
        columns: list[Iterable[bytes]]
        small = max(map(len, self.payloads), default=0) * PIECE_JOBS <= PIECE_BYTES
        while start < len(self.ids):
            stop = min(len(self.ids), start + PIECE_JOBS) if small else self._stop(start)
            payloads = self.payloads[start:stop]
            shapes = list(zip(self.names[start:stop], map(len, payloads), self.retries[start:stop], strict=True))
            for shape in set(shapes) - frames.keys():
                frames[shape] = self._frame(*shape, created)
            # Column by column and never job by job: all of this is loops in C.
            heads, middles, tails = zip(*map(frames.__getitem__, shapes), strict=True)
            columns = [heads, map(str.encode, self.ids[start:stop]), middles, payloads, tails]
            if at is not None:
                zadd = b"*4\r\n" + bulks(b"ZADD", self.target.encode())
                columns.insert(0, [zadd + bulks(b"%d" % score) for score in at[start:stop]])
            yield b"".join(chain.from_iterable(zip(*columns, strict=True))), stop - start
            start = stop

    def _stop(self, start: int) -> int:
        """Where a piece that begins there ends: after so many jobs, or so many bytes."""
        stop = min(len(self.ids), start + PIECE_JOBS)
        size = 0
        for i in range(start, stop):
            size += len(self.payloads[i])
            if size > PIECE_BYTES:
                return i + 1
        return stop

    def _frame(self, name: bytes, size: int, retry: bytes, created: bytes) -> tuple[bytes, bytes, bytes]:
        """What surrounds id and payload: up to the id, between the two, and after the payload."""
        array = (b"\x95" if retry else b"\x94") + bytes([0xA0 | _ULID_BYTES])
        length = envelope_size(size, len(retry))
        tail = created + retry + b"\r\n"
        if self.run_at_ms is not None:
            prefix = struct.pack("<I", len(name)) + name
            return b"$%d\r\n%b%b" % (len(prefix) + length, prefix, array), _bin_header(size), tail
        args = [b"XADD", self.target.encode()]
        if self.trim:
            args += [b"MAXLEN", b"~", b"%d" % self.trim]
        args += [b"*", b"d"]
        head = b"*%d\r\n%b$%d\r\n%b" % (len(args) + (3 if name else 1), bulks(*args), length, array)
        return head, _bin_header(size), tail + (bulks(b"n", name) if name else b"")


def envelope_size(payload_size: int, retry_size: int) -> int:
    """Bytes of the envelope of a new job with an id of ours."""
    return 2 + _ULID_BYTES + len(_bin_header(payload_size)) + payload_size + _CREATED_BYTES + 1 + retry_size


def bulks(*args: bytes) -> bytes:
    """Arguments in the protocol's form."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)


def _bin_header(size: int) -> bytes:
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    if size < 1 << 16:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)
