"""Jobs in columns -> blocks: what a transactional writer stages, and scripts publish.

A block is a MessagePack array that Lua's cmsgpack can read, so it knows raw strings only (no ``bin``, no ``str8``).
Its first element tells what follows; nothing in it is ever changed:

    same    name, then an envelope per job           jobs of one name for the stream
    named   name and envelope per job                jobs of several names for the stream
    later   run-at and member per job                jobs for the delayed set
    unique  id, run-at ("" = now), the marker's TTL in s (0 = the id is ours), envelope or member, and name per job
    dead    envelope, name, reason, detail per row   rows that could not become jobs, for the dead letters

A thousand jobs are one value in one command: that is what makes staging cheaper than adding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeAlias

import msgpack

from chasqui.errors import DecodeError
from chasqui.job import RetryOverride
from chasqui.protocol.codec import encode_member, retry_fields
from chasqui.protocol.scripts import SCRIPT_BYTES, SCRIPT_ENTRIES

UNIQUE_JOBS = 250  # each has two keys of its own in the script's call
_WIDTHS = {"same": 1, "named": 2, "later": 2, "unique": 5, "dead": 4}
_Head: TypeAlias = tuple[str, bytes]  # a block's kind, and the name that its jobs share


@dataclass(slots=True)
class Jobs:
    """Jobs of one queue, column by column and in order. ``payloads`` are MessagePack.

    ``name`` stands for all jobs where ``names`` is None. ``retries`` holds packed overrides, empty for none.
    ``run_at_ms``: None where the column, or a job's value, means now. ``marker_ttls_s``: for jobs with an id that was
    given, how long it stays taken; 0 for those whose id was made. None where no id was given.
    """

    created_at_ms: int
    ids: Sequence[str]
    payloads: Sequence[bytes]
    name: bytes = b""
    names: Sequence[bytes] | None = None
    retries: Sequence[bytes] | None = None
    run_at_ms: Sequence[int | None] | None = None
    marker_ttls_s: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Jobs:
        return self._each(lambda column: column[part])

    def where(self, chosen: Sequence[int]) -> Jobs:
        """Those at these places."""
        return self._each(lambda column: [column[i] for i in chosen])

    def _each(self, cut: Callable[[Sequence[object]], Sequence[object]]) -> Jobs:
        def of(column: Sequence[object] | None) -> Sequence[object] | None:
            return None if column is None else cut(column)

        return Jobs(
            self.created_at_ms,
            cut(self.ids),  # type: ignore[arg-type]
            cut(self.payloads),  # type: ignore[arg-type]
            self.name,
            of(self.names),  # type: ignore[arg-type]
            of(self.retries),  # type: ignore[arg-type]
            of(self.run_at_ms),  # type: ignore[arg-type]
            of(self.marker_ttls_s),  # type: ignore[arg-type]
        )

    def each_name(self) -> Sequence[bytes]:
        return [self.name] * len(self.ids) if self.names is None else self.names

    def each_retry(self) -> Sequence[bytes]:
        return [b""] * len(self.ids) if self.retries is None else self.retries

    def split_by_time(self) -> tuple[Jobs, Jobs]:
        """Those for now, and those for later."""
        if self.run_at_ms is None:
            return self, self[:0]
        later = [i for i, at in enumerate(self.run_at_ms) if at is not None]
        if len(later) == len(self.ids):
            return self[:0], self
        now = self.where([i for i, at in enumerate(self.run_at_ms) if at is None])
        now.run_at_ms = None
        return now, self.where(later)

    def envelopes(self) -> list[bytes]:
        """Every job's envelope: a loop in C, and behind it the override of those that have one, which is packed."""
        pack = msgpack.Packer(use_bin_type=True).pack
        plain = map(pack, zip(self.ids, self.payloads, repeat(self.created_at_ms), repeat(0), strict=False))
        if self.retries is None:
            return list(plain)
        return [b"\x95" + e[1:] + r if r else e for e, r in zip(plain, self.retries, strict=True)]


@dataclass(frozen=True, slots=True)
class Dead:
    """A row that could not become a job, as a dead letter."""

    envelope: bytes
    name: bytes
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Block:
    rows: int
    data: bytes


def packed_retry(retry: RetryOverride | None) -> bytes:
    """An override as it stands in an envelope; empty for none."""
    return b"" if retry is None else bytes(msgpack.packb(retry_fields(retry)))


class BlockBuilder:
    """Collects jobs of one queue, and gives out blocks when they are full; ``rest`` gives out what is left.

    Jobs keep their order within the stream. ``size`` is what it holds at the moment, in bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._open: dict[_Head, _Open] = {}

    def add(self, jobs: Jobs) -> Iterator[Block]:
        if jobs.marker_ttls_s is not None:
            yield from self._add(("unique", b""), jobs, _unique_items, UNIQUE_JOBS)
            return
        now, later = jobs.split_by_time()
        if len(now):
            if now.names is None:
                yield from self._add(("same", now.name), now, _same_items, SCRIPT_ENTRIES)
            else:
                yield from self._add(("named", b""), now, _named_items, SCRIPT_ENTRIES)
        if len(later):
            yield from self._add(("later", b""), later, _later_items, SCRIPT_ENTRIES)

    def add_dead(self, letter: Dead) -> Iterator[Block]:
        item = b"".join(map(_raw, [letter.envelope, letter.name, letter.reason.encode(), letter.detail.encode()]))
        yield from self._put(("dead", b""), item, 1, SCRIPT_ENTRIES)

    def rest(self) -> Iterator[Block]:
        for head, building in self._open.items():
            if building.rows:
                yield building.block(head)
        self._open, self.size = {}, 0

    def _add(self, head: _Head, jobs: Jobs, items: Callable[[Jobs], bytes], limit: int) -> Iterator[Block]:
        """Encoded in one piece where that fits a block; else in halves, so that a rare giant costs only its own way."""
        if len(jobs) > limit:
            for start in range(0, len(jobs), limit):
                yield from self._add(head, jobs[start : start + limit], items, limit)
            return
        if len(jobs) > 1 and sum(map(len, jobs.payloads)) > SCRIPT_BYTES * 3 // 4:
            half = len(jobs) // 2
            yield from self._add(head, jobs[:half], items, limit)
            yield from self._add(head, jobs[half:], items, limit)
            return
        yield from self._put(head, items(jobs), len(jobs), limit)

    def _put(self, head: _Head, data: bytes, rows: int, limit: int) -> Iterator[Block]:
        building = self._open.setdefault(head, _Open())
        if building.rows and (building.rows + rows > limit or building.size + len(data) > SCRIPT_BYTES):
            yield self._close(head)
        building = self._open.setdefault(head, _Open())
        building.parts.append(data)
        building.rows += rows
        building.size += len(data)
        self.size += len(data)
        if building.rows == limit:
            yield self._close(head)

    def _close(self, head: _Head) -> Block:
        building = self._open.pop(head)
        self.size -= building.size
        return building.block(head)


class _Open:
    """A block that is being filled."""

    __slots__ = ("parts", "rows", "size")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.rows = 0
        self.size = 0

    def block(self, head: _Head) -> Block:
        kind, name = head
        lead = [_raw(kind.encode())] + ([_raw(name)] if kind == "same" else [])
        return Block(self.rows, b"".join([_array_header(len(lead) + self.rows * _WIDTHS[kind]), *lead, *self.parts]))


def _raw(data: bytes) -> bytes:
    return _raw_header(len(data)) + data


def _raw_header(size: int) -> bytes:
    if size < 32:
        return bytes([0xA0 | size])
    if size < 1 << 16:
        return struct.pack(">BH", 0xDA, size)
    return struct.pack(">BI", 0xDB, size)


def _array_header(size: int) -> bytes:
    return struct.pack(">BH", 0xDC, size)


def _same_items(jobs: Jobs) -> bytes:
    envelopes = jobs.envelopes()
    return b"".join(chain.from_iterable(zip(_headers(envelopes), envelopes, strict=True)))


def _named_items(jobs: Jobs) -> bytes:
    envelopes, names = jobs.envelopes(), jobs.each_name()
    known = {name: _raw(name) for name in set(names)}
    columns = (map(known.__getitem__, names), _headers(envelopes), envelopes)
    return b"".join(chain.from_iterable(zip(*columns, strict=True)))


def _later_items(jobs: Jobs) -> bytes:
    members = list(map(encode_member, jobs.each_name(), jobs.envelopes()))
    scores = [_raw(b"%d" % (at or 0)) for at in jobs.run_at_ms or ()]
    return b"".join(chain.from_iterable(zip(scores, _headers(members), members, strict=True)))


def _headers(values: Sequence[bytes]) -> Iterator[bytes]:
    """What stands before each of them; made once for each size."""
    sizes = list(map(len, values))
    known = {size: _raw_header(size) for size in set(sizes)}
    return map(known.__getitem__, sizes)


def _unique_items(jobs: Jobs) -> bytes:
    pieces: list[bytes] = []
    times: Iterable[int | None] = repeat(None) if jobs.run_at_ms is None else jobs.run_at_ms
    for job_id, envelope, name, at, ttl in zip(
        jobs.ids, jobs.envelopes(), jobs.each_name(), times, jobs.marker_ttls_s or (), strict=False
    ):
        data = envelope if at is None else encode_member(name, envelope)
        run_at = b"" if at is None else b"%d" % at
        pieces += map(_raw, [job_id.encode(), run_at, b"%d" % ttl, data, name])
    return b"".join(pieces)


def unique_ids(block: bytes, first: int, count: int) -> list[str]:
    """The ids of jobs of a ``unique`` block, from one on."""
    try:
        jobs = msgpack.unpackb(block, raw=True)
        if jobs[0] != b"unique" or (len(jobs) - 1) % 5:
            raise DecodeError("a staged block is not what its writer made")
        return [jobs[i].decode() for i in range(1 + first * 5, min(len(jobs), 1 + (first + count) * 5), 5)]
    except (ValueError, TypeError, IndexError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"a staged block cannot be read: {type(error).__name__} {error}"[:200]) from None
