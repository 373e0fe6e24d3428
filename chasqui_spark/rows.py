"""Stream entries into Arrow record batches of a view: a page at a time, column by column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chasqui import DecodeError, RetryOverride
from chasqui.bridge import JobColumns, JobSpans, entry_fields, job_columns, parse_event
from chasqui_spark.options import SourceOptions
from chasqui_spark.payloads import PayloadColumn
from chasqui_spark.views import arrow_schema, payload_columns, schema_of

Dropped: TypeAlias = list[tuple[str, str]]
"""Entries left out of a batch because they are no jobs, or do not fit: entry id and reason."""

INT64 = 2**63 - 1
_TIME = pa.timestamp("us", tz="UTC")
_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999  # years 1 to 9999, as Spark and Python have them
_MS_DIGITS = 13  # of the millisecond part of ids made from 2001 to 2286


class Rows:
    """Makes record batches of one view. ``badJobs`` decides about entries that cannot be read: ``fail`` raises,
    ``null`` gives a row whose payload is null and whose ``error`` says why; with ``dropped`` given they are left out of
    the batch and appended there, whatever ``badJobs`` says.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.view = options.view
        self.schema = arrow_schema(schema_of(options))
        self._fail = options.bad_jobs == "fail"
        declared = payload_columns(options)
        self._payload = None if declared is None else PayloadColumn(declared)
        self._make: Callable[[str, Any, Dropped | None], pa.RecordBatch] = {
            "jobs": self._jobs,
            "dlq": self._dead_letters,
            "events": self._events,
        }.get(self.view, self._jobs)

    def batch(self, queue: str, entries: Sequence[Any] | JobSpans, dropped: Dropped | None = None) -> pa.RecordBatch:
        """The rows of a page as the reader yields it: entries of id and flat list of fields and values, or spans."""
        return self._make(queue, entries, dropped)

    def finished(self, columns: dict[str, pa.Array], where: Sequence[str], dropped: Dropped | None) -> pa.RecordBatch:
        """Put columns in the view's order; rows with an error are dealt with here. ``where`` names each row."""
        batch = pa.RecordBatch.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)
        errors = columns["error"]
        if errors.null_count == len(errors) or (dropped is None and not self._fail):
            return batch
        bad = pc.is_valid(errors)
        first = pc.index(bad, True).as_py()
        if dropped is None:
            raise DecodeError(
                f"{where[first]}: {errors[first].as_py()}. With badJobs=null such entries are rows whose payload is "
                f"null and whose error says why"
            )
        reasons = errors.to_pylist()
        dropped += [(where[i], reason) for i, reason in enumerate(reasons) if reason is not None]
        return batch.filter(pc.invert(bad))

    def job_arrays(self, jobs: JobColumns, payload: str = "payload") -> dict[str, pa.Array]:
        """The columns that every view of jobs has: id, name, payload, created_at, attempt, retry, error."""
        count = len(jobs.ids)
        errors = jobs.errors
        if self._payload is None:
            payloads = pa.array(jobs.payloads, pa.binary())
        else:
            given = jobs.payloads
            payloads, misfits = self._payload.array(given.to_pylist() if isinstance(given, pa.Array) else given)
            if misfits:
                errors = [misfits.get(i, error) for i, error in enumerate(errors or [None] * count)]
        return {
            "id": pa.array(jobs.ids, pa.string()),
            "name": texts(jobs.names),
            payload: payloads,
            "created_at": times(jobs.created_ms),
            "attempt": pa.array(jobs.attempts, pa.int64()),
            "retry": retries(jobs.retries, count, self.schema.field("retry").type)
            if "retry" in self.schema.names
            else pa.nulls(count),
            "error": pa.nulls(count, pa.string()) if errors is None else pa.array(errors, pa.string()),
        }

    def _jobs(self, queue: str, page: Any, dropped: Dropped | None) -> pa.RecordBatch:
        if isinstance(page, JobSpans):
            try:
                return self._job_spans(queue, page, dropped)
            except pa.ArrowInvalid:  # an id that is not UTF-8
                page = page.entries()
        columns = self.job_arrays(job_columns(page)) | stream_arrays(queue, page)
        return self.finished(columns, _Where(queue, page, dropped), dropped)

    def _job_spans(self, queue: str, jobs: JobSpans, dropped: Dropped | None) -> pa.RecordBatch:
        names = [b""] * len(jobs) if jobs.names is None else _between(jobs.data, jobs.names)
        ids, payloads = _between(jobs.data, jobs.ids), _between(jobs.data, jobs.payloads)
        found = JobColumns(ids, names, payloads, jobs.created_ms, jobs.attempts, None, None)  # type: ignore[arg-type]
        columns = self.job_arrays(found) | {
            "queue": pa.repeat(pa.scalar(queue, pa.string()), len(jobs)),
            "entry_id": _between(jobs.data, jobs.entry_ids).cast(pa.string()),
            "enqueued_at": _from_ms(pa.array(jobs.enqueued_ms)),
        }
        return self.finished(columns, _Where(queue, jobs, dropped), dropped)

    def _dead_letters(self, queue: str, entries: Sequence[Any], dropped: Dropped | None) -> pa.RecordBatch:
        columns = self.job_arrays(job_columns(entries)) | stream_arrays(queue, entries)
        found = [entry_fields(entry[1]) for entry in entries]
        for column, field in (
            ("source_id", b"source_id"),
            ("reason", b"reason"),
            ("detail", b"detail"),
            ("failure", b"error"),
        ):
            columns[column] = pa.array([_readable(one.get(field)) for one in found], pa.string())
        return self.finished(columns, _Where(queue, entries, dropped), dropped)

    def _events(self, queue: str, entries: Sequence[Any], _: Dropped | None) -> pa.RecordBatch:
        events = [parse_event(entry) for entry in entries]
        numbers = ("attempt", "duration_us", "backoff_ms", "delay_ms")
        rest: list[list[tuple[str, str]]] = []
        found: dict[str, list[int | None]] = {name: [] for name in numbers}
        reasons: list[str | None] = []
        for event in events:
            other = dict(event.fields)
            for name in numbers:
                value = other.get(name)
                whole = value if isinstance(value, int) and abs(value) <= INT64 else None
                found[name].append(whole)
                if whole is not None:
                    del other[name]
            reason = other.pop("reason", None)
            reasons.append(None if reason is None else str(reason))
            rest.append([(key, str(value)) for key, value in other.items()])
        columns = stream_arrays(queue, entries) | {
            "event": pa.array([event.name for event in events], pa.string()),
            "id": pa.array([event.job_id for event in events], pa.string()),
            "name": pa.array([event.job_name for event in events], pa.string()),
            "created_at": times([event.ts_ms for event in events]),
            "reason": pa.array(reasons, pa.string()),
            "fields": pa.array(rest, self.schema.field("fields").type),
            **{name: pa.array(values, pa.int64()) for name, values in found.items()},
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)


class _Where(Sequence[str]):
    """Names of rows, made only when they are asked for: for people, or bare ids where entries are dropped."""

    def __init__(self, queue: str, entries: Sequence[Any] | JobSpans, dropped: Dropped | None) -> None:
        self._queue, self._entries, self._bare = queue, entries, dropped is not None

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, i: Any) -> Any:
        entries = self._entries
        entry_id = (entries.entry_id(i) if isinstance(entries, JobSpans) else entries[i][0]).decode()
        return entry_id if self._bare else f"entry {entry_id} of queue {self._queue!r}"


def stream_arrays(queue: str, entries: Sequence[Any]) -> dict[str, pa.Array]:
    """queue, entry_id and enqueued_at of stream entries."""
    ids = pa.array([entry[0] for entry in entries], pa.binary()).cast(pa.string())
    return {
        "queue": pa.repeat(pa.scalar(queue, pa.string()), len(entries)),
        "entry_id": ids,
        "enqueued_at": id_times(ids),
    }


def _between(data: bytes, span: Any) -> pa.Array:
    """The bytes between each begin and its end. Arrow takes all of them at once out of an array that also has, in the
    odd places, what lies between one and the next.
    """
    begins, ends = span
    places = np.empty(2 * len(begins), np.int32)
    places[::2], places[1::2] = begins, ends
    buffers = [None, pa.py_buffer(places), pa.py_buffer(data)]
    both = pa.Array.from_buffers(pa.binary(), len(places) - 1, buffers)
    return both.take(pa.array(np.arange(0, len(places) - 1, 2)))


def id_times(ids: pa.Array) -> pa.Array:
    """The times in entry ids."""
    ends = pc.min_max(pc.find_substring(ids, "-")).as_py()
    if ends["min"] == ends["max"] == _MS_DIGITS:
        return _from_ms(pc.utf8_slice_codeunits(ids, 0, _MS_DIGITS).cast(pa.int64()))
    return times([int(entry_id.partition("-")[0]) for entry_id in ids.to_pylist()])


def times(values: Sequence[int | None]) -> pa.Array:
    """Epoch milliseconds as timestamps; null where a timestamp does not reach so far."""
    try:
        found = pa.array(values, pa.int64())
        ends = pc.min_max(found).as_py()
        if ends["min"] is None or _FIRST_MS <= ends["min"] <= ends["max"] <= _LAST_MS:
            return _from_ms(found)
    except (OverflowError, pa.ArrowInvalid):
        pass
    return _from_ms(
        pa.array([ms if ms is not None and _FIRST_MS <= ms <= _LAST_MS else None for ms in values], pa.int64())
    )


def _from_ms(ms: pa.Array) -> pa.Array:
    return pc.multiply_checked(ms, 1000).cast(_TIME)


def texts(values: Sequence[bytes | str]) -> pa.Array:
    """Names; one that is not UTF-8 is empty, as workers see it."""
    if values and isinstance(values[0], str):
        return pa.array(values, pa.string())
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in pa.array(values, pa.binary()).to_pylist()], pa.string())


def _text(value: bytes | str) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        return ""


def _readable(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def retries(values: Sequence[RetryOverride | None] | None, count: int, kind: pa.DataType) -> pa.Array:
    if values is None:
        return pa.nulls(count, kind)
    return pa.array([_retry(value) for value in values], kind)


def _retry(retry: RetryOverride | None) -> dict[str, Any] | None:
    if retry is None:
        return None
    backoff = retry.backoff
    return {
        "max_attempts": retry.max_attempts,
        "backoff": None
        if backoff is None
        else {
            "kind": backoff.kind,
            "delay_ms": _clamped(backoff.delay_ms),
            "max_delay_ms": _clamped(backoff.max_delay_ms),
            "multiplier": backoff.multiplier,
            "jitter_ms": _clamped(backoff.jitter_ms),
        },
    }


def _clamped(value: int | None) -> int | None:
    """Waits of more than 64 bits less one are for ever either way."""
    return None if value is None else min(value, INT64)
