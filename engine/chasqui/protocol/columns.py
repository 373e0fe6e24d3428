"""A page of stream entries, turned into columns: the same rules as for one job, a page at a time.

Connectors read hundreds of thousands of jobs a second. A page whose entries all look as every producer writes them is
taken apart column by column, without a step of Python for each entry and field; where one does not, the page is read
job by job. Both ways give the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

from chasqui.errors import DecodeError
from chasqui.job import U32_MAX, RetryOverride
from chasqui.protocol.codec import decode_fields, decode_name, split_member
from chasqui.protocol.replies import fields, parsed

if TYPE_CHECKING:
    import numpy as np

    Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
    Span: TypeAlias = tuple[Numbers, Numbers]

_unpack = msgpack.unpackb
_MISSING = "the entry has no field d"


@dataclass(slots=True)
class JobColumns:
    """Jobs, column by column. ``errors`` is None for those that could be read; of the others nothing else is known."""

    ids: Sequence[str | None]
    names: Sequence[bytes | str]
    payloads: Sequence[bytes | None]
    created_ms: Sequence[int | None]
    attempts: Sequence[int | None]
    retries: Sequence[RetryOverride | None] | None
    errors: Sequence[str | None] | None


@dataclass(frozen=True, slots=True)
class JobSpans:
    """Jobs as places in the bytes of a reply, which ``protocol/spans.py`` finds: where each part begins and ends.

    ``names`` is None where no job has one; ``enqueued_ms`` is the time in an entry's id. No job has overrides. Ids and
    names are as they came, UTF-8 or not.
    """

    data: bytes
    entry_ids: Span
    enqueued_ms: Numbers
    ids: Span
    names: Span | None
    payloads: Span
    created_ms: Numbers
    attempts: Numbers

    def __len__(self) -> int:
        return len(self.created_ms)

    def entry_id(self, i: int) -> bytes:
        begins, ends = self.entry_ids
        return self.data[begins[i] : ends[i]]

    def all_entry_ids(self) -> list[bytes]:
        begins, ends = (place.tolist() for place in self.entry_ids)
        return [self.data[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def entries(self) -> list[Any]:
        """The same entries, parsed."""
        found: list[Any] = parsed(self.data)
        return found


def job_columns(entries: Sequence[Any]) -> JobColumns:
    """The jobs of stream entries (id, flat list of fields and values). ``names`` are bytes, valid UTF-8 or not, in a
    page that could be read at once; ``retries`` and ``errors`` are None where no job has one.
    """
    return _at_once(entries) or one_by_one([fields(entry[1]) for entry in entries])


def _at_once(entries: Sequence[Any]) -> JobColumns | None:
    flats = [entry[1] for entry in entries]
    try:
        if {flat[0] for flat in flats} != {b"d"}:
            return None
        lengths = {len(flat) for flat in flats}
        if lengths == {4}:
            if {flat[2] for flat in flats} != {b"n"}:
                return None
            names: list[Any] = [flat[3] for flat in flats]
        elif lengths == {2}:
            names = [b""] * len(flats)
        elif lengths == {2, 4}:
            if {flat[2] for flat in flats if len(flat) == 4} != {b"n"}:
                return None
            names = [flat[3] if len(flat) == 4 else b"" for flat in flats]
        else:
            return None
        decoded = []
        for flat in flats:
            found = _unpack(flat[1])
            # Payloads that stand inline may be a hundred times as large decoded: not a page of them at once.
            if type(found) is not list or len(found) != 4 or type(found[1]) is not bytes:
                return None
            decoded.append(found)
    except (ValueError, TypeError, IndexError, RecursionError, MemoryError, OverflowError):
        return None
    ids, payloads, created, attempts = zip(*decoded, strict=True)
    if (
        set(map(type, ids)) != {str}
        or set(map(type, created)) != {int}
        or set(map(type, attempts)) != {int}
        or min(created) < 0
        or min(attempts) < 0
        or max(attempts) > U32_MAX
    ):
        return None
    return JobColumns(ids, names, payloads, created, attempts, None, None)


def one_by_one(entries: Sequence[dict[bytes, bytes]]) -> JobColumns:
    """The same with the engine's own reader, for entries of any form."""
    jobs: list[tuple[Any, ...]] = []
    for found in entries:
        data = found.get(b"d")
        name = decode_name(found.get(b"n"))
        try:
            if data is None:
                raise DecodeError(_MISSING)
            job_id, payload, created, attempt, retry, _ = decode_fields(data)
            jobs.append((job_id, name, payload, created, attempt, retry, None))
        except DecodeError as error:
            jobs.append((None, name, None, None, None, None, error.message))
    if not jobs:
        return JobColumns((), (), (), (), (), None, None)
    return JobColumns(*zip(*jobs, strict=True))


def delayed_columns(members: Sequence[bytes]) -> JobColumns:
    """The jobs of delayed members."""
    entries: list[dict[bytes, bytes]] = []
    problems: dict[int, str] = {}
    for i, member in enumerate(members):
        try:
            name, data = split_member(member)
            entries.append({b"d": data, b"n": name})
        except DecodeError as error:
            problems[i] = error.message
            entries.append({})
    found = one_by_one(entries)
    if problems and found.errors is not None:
        found.errors = [problems.get(i, error) for i, error in enumerate(found.errors)]
    return found
