"""Bulk adds, written straight as protocol bytes.

The hot path of producers: the server works on the first piece while the next ones are still being written, and what is
common to jobs of the same name and size is made once. A script per chunk would be tidier, but calling XADD from Lua
costs the server twice what the bare command does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgpack

# The first piece is small, so that the server starts early. Each is larger than the one before, because making one
# takes us a fraction of the time that the server needs for it: it is never kept waiting, and where it has to share a
# core with us, it is not woken for every few jobs.
FIRST_JOBS = 64
GROWTH = 4
PIECE_JOBS = FIRST_JOBS * GROWTH**2
PIECE_BYTES = 1 << 18
Column: TypeAlias = Iterable[bytes]

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
    sizes: Sequence[int] | None = None  # of the payloads, where somebody has looked at them already

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
            sizes=None,
        )

    def pieces(self, start: int) -> Iterator[tuple[bytes, int]]:
        """Commands as bytes, and how many are in them, from job number ``start`` on."""
        sizes = list(map(len, self.payloads)) if self.sizes is None else self.sizes
        frames = self._frames(sizes)
        room = FIRST_JOBS
        while start < len(self.ids):
            stop = min(len(self.ids), start + room)
            if sum(sizes[start:stop]) > PIECE_BYTES:
                stop = self._stop(start, stop)
            # Column by column and never job by job: all of this is loops in C.
            heads, middles, tails = frames(start, stop)
            columns = [heads, map(str.encode, self.ids[start:stop]), middles, self.payloads[start:stop], tails]
            if self.run_at_ms is not None:
                columns.insert(0, self._zadds(self.run_at_ms[start:stop]))
            woven: list[bytes] = [b""] * (len(columns) * (stop - start))
            for i, column in enumerate(columns):
                woven[i :: len(columns)] = column
            yield b"".join(woven), stop - start
            start, room = stop, min(room * GROWTH, PIECE_JOBS)

    def _frames(self, sizes: Sequence[int]) -> Callable[[int, int], tuple[Column, Column, Column]]:
        """What surrounds ids and payloads from one job to another: three columns."""
        created = msgpack.packb(self.created_at_ms) + b"\x00"
        frames: dict[tuple[bytes, int, bytes], tuple[bytes, bytes, bytes]] = {}
        heads: dict[int, bytes] = {}
        middles: dict[int, bytes] = {}
        tail = b""

        def of_one_kind(start: int, stop: int) -> tuple[Column, Column, Column]:
            nonlocal tail
            part = sizes[start:stop]
            distinct = set(part)
            for size in distinct - heads.keys():
                heads[size], middles[size], tail = self._frame(self.names[0], size, self.retries[0], created)
            if len(distinct) == 1:
                return [heads[part[0]]] * len(part), [middles[part[0]]] * len(part), [tail] * len(part)
            return map(heads.__getitem__, part), map(middles.__getitem__, part), [tail] * len(part)

        def of_many(start: int, stop: int) -> tuple[Column, Column, Column]:
            shapes = list(zip(self.names[start:stop], sizes[start:stop], self.retries[start:stop], strict=True))
            for shape in set(shapes) - frames.keys():
                frames[shape] = self._frame(*shape, created)
            columns = zip(*map(frames.__getitem__, shapes), strict=True)
            return next(columns), next(columns), next(columns)

        return of_one_kind if self._alike() else of_many

    def _alike(self) -> bool:
        """Whether all jobs have one name and one override, as those of most bulks."""
        count = len(self.ids)
        return bool(count) and self.names.count(self.names[0]) == self.retries.count(self.retries[0]) == count

    def _zadds(self, scores: Sequence[int]) -> Column:
        start = b"*4\r\n" + bulks(b"ZADD", self.target.encode())
        return map({score: start + bulks(b"%d" % score) for score in set(scores)}.__getitem__, scores)

    def _stop(self, start: int, stop: int) -> int:
        """Where a piece that begins there ends: at that job, or after so many bytes."""
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
