"""What of a page of claimed entries becomes rows, and what goes to the dead letters on arrival, as in any worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from chasqui.bridge import DeadLetter, JobSpans, Limits, classify, entry_fields
from chasqui_spark.rows import Rows

Entry = tuple[bytes, Any, int]
_OVERHEAD = 16  # bytes of an envelope beside id and payload: fewer, in truth
_NO_JOBS = frozenset({"malformed", "decode_failed"})


def sift(
    rows: Rows, queue: str, page: Sequence[Entry] | JobSpans, limits: Limits, *, keep_bad: bool
) -> tuple[pa.RecordBatch, list[DeadLetter]]:
    """Rows and dead letters. With ``keep_bad`` entries that are no jobs stay, for ``badJobs`` to decide about; what is
    too large, or has no run left, never does.
    """
    dropped: list[tuple[str, str]] | None = None if keep_bad else []
    if isinstance(page, JobSpans):
        if _all_fit(page, limits):
            batch = rows.batch(queue, page, dropped)
            if not dropped:
                return batch, []
            dropped = []
        page = [(entry_id, flat, 0) for entry_id, flat in page.entries()]
    letters: list[DeadLetter] = []
    good: list[Entry] = []
    for entry in page:
        flat = entry[1]
        if entry[2] or len(flat) < 2 or len(flat[1]) > limits.max_payload_bytes:
            found = classify(entry, limits, None)
            if isinstance(found, DeadLetter) and not (keep_bad and found.reason in _NO_JOBS):
                letters.append(found)
                continue
        good.append(entry)
    batch = rows.batch(queue, good, dropped)
    if dropped:
        why = dict(dropped)
        letters += [_misfit(entry, limits, why[entry[0].decode()]) for entry in good if entry[0].decode() in why]
        good = [entry for entry in good if entry[0].decode() not in why]
    spent = _spent(batch, good, limits)
    if spent:
        letters += spent.values()
        batch = batch.filter(pa.array([entry[0] not in spent for entry in good]))
    return batch, letters


def _all_fit(page: JobSpans, limits: Limits) -> bool:
    """Whether no job of the page is too large or has had its runs, told in one look."""
    largest = int((page.payloads[1] - page.ids[0]).max()) + _OVERHEAD
    return largest <= limits.max_payload_bytes and int(page.attempts.max()) < limits.max_attempts


def _misfit(entry: Entry, limits: Limits, why: str) -> DeadLetter:
    """An entry that is no job; or a job whose payload is not what ``payloadSchema`` declares."""
    found = classify(entry, limits, None)
    if isinstance(found, DeadLetter):
        return found
    data = entry_fields(entry[1]).get(b"d", b"")
    return DeadLetter(entry[0], data, found.name_bytes, "decode_failed", found.attempt, found.id, detail=why[:1024])


def _spent(batch: pa.RecordBatch, good: Sequence[Entry], limits: Limits) -> dict[bytes, DeadLetter]:
    """Jobs that have had all their runs. Only those are looked at that may have: the others cost a comparison."""
    attempts, retries = batch.column("attempt"), batch.column("retry")
    most = pc.max(attempts).as_py()
    if (most is None or most < limits.max_attempts) and retries.null_count == len(retries):
        return {}
    maybe = pc.or_kleene(pc.is_valid(retries), pc.greater_equal(attempts, limits.max_attempts)).to_pylist()
    found: dict[bytes, DeadLetter] = {}
    for entry, look in zip(good, maybe, strict=True):
        if look:
            one = classify(entry, limits, None)
            if isinstance(one, DeadLetter) and one.reason not in _NO_JOBS:
                found[entry[0]] = one
    return found
