"""Rows -> encoded jobs: which column means what, and what a row must hold to become a job.

Everything that can be told from the columns' names and types is told when the writer is made, before a row is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t

from chasqui import Backoff, ChasquiError, ConfigError, RetryOverride
from chasqui.bridge import Dead, Jobs, checked_queue, id_bytes, marker_ttl_s, name_bytes, new_ids, packed_retry
from chasqui_spark.options import SinkOptions
from chasqui_spark.packing import BAD_VALUES, payloads_as_given, payloads_of_rows, payloads_of_values, values

# Rows converted at a time: as many as a block holds, and about as many bytes as are comfortable to hold three times.
SLICE_ROWS, SLICE_BYTES = 1000, 4 << 20
# A dead letter keeps a payload that is too large, but not one that would hurt the server.
_LARGEST_LETTER = 16 << 20
_OVERHEAD = 64  # bytes of an envelope beside payload, id and override: fewer, in truth

_BACKOFF = ("kind", "delay_ms", "max_delay_ms", "multiplier", "jitter_ms")
_FLAT_RETRY = ("max_attempts", *(f"backoff_{field}" for field in _BACKOFF))
_TEXT = (t.StringType, t.CharType, t.VarcharType)
_WHOLE = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_NUMBER = (*_WHOLE, t.FloatType, t.DoubleType, t.DecimalType)
_MOMENT = (t.TimestampType, t.TimestampNTZType, t.LongType)
_EXPECTED: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "queue": (_TEXT, "string"),
    "id": (_TEXT, "string"),
    "name": (_TEXT, "string"),
    "delay_ms": (_WHOLE, "bigint"),
    "run_at": (_MOMENT, "timestamp, or bigint with epoch milliseconds"),
    "max_attempts": (_WHOLE, "int or bigint"),
    "backoff_kind": (_TEXT, "string"),
    "backoff_delay_ms": (_WHOLE, "bigint"),
    "backoff_max_delay_ms": (_WHOLE, "bigint"),
    "backoff_multiplier": (_NUMBER, "double"),
    "backoff_jitter_ms": (_WHOLE, "bigint"),
}
RESERVED = (*_EXPECTED, "retry")
_PACKABLE = (t.NullType, t.BooleanType, *_NUMBER, *_TEXT, t.BinaryType, t.DateType, t.TimestampType, t.TimestampNTZType)
# TIME is younger than the oldest Spark that is supported.
_TIME: tuple[type[t.DataType], ...] = tuple(filter(None, [getattr(t, "TimeType", None)]))


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot become a job: its number in the task, the column, and why."""

    row: int
    column: str
    why: str
    reason: str = "malformed"

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}: {self.why}"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows as jobs by queue, in order, and those that are none, with the queue whose dead letter each would be."""

    jobs: list[tuple[str, Jobs]]
    bad: list[tuple[BadRow, str | None, Dead]]


class Encoder:
    """Made from options and columns; goes to the executors. ``encode`` turns Arrow batches into jobs."""

    def __init__(self, options: SinkOptions, schema: t.StructType) -> None:
        self._options = options
        names = schema.names
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(f"column {', '.join(doubled)} stands twice in the DataFrame: rename or drop one")
        kinds = {field.name: field.dataType for field in schema}
        self._reserved = tuple(name for name in names if name in RESERVED)
        self._payload = "payload" in kinds
        self._raw = isinstance(kinds.get("payload"), t.BinaryType)
        self._columns = tuple(name for name in names if name not in RESERVED)
        if options.queue is None and "queue" not in kinds:
            raise ConfigError("a queue is needed: set the option queue, or have a column queue")
        if self._payload and len(self._columns) > 1:
            others = ", ".join(name for name in self._columns if name != "payload")
            raise ConfigError(
                f"column {others} would be lost: with a column payload the others are {', '.join(RESERVED)}; put it "
                f"into the payload (struct(...)), or drop it"
            )
        for name in self._reserved:
            _check_reserved(name, kinds[name])
        if "retry" in kinds and set(_FLAT_RETRY) & set(kinds):
            raise ConfigError(
                f"column retry and column {', '.join(sorted(set(_FLAT_RETRY) & set(kinds)))} exclude each other"
            )
        if "delay_ms" in kinds and "run_at" in kinds:
            raise ConfigError("column delay_ms and column run_at exclude each other: drop one")
        for name in self._columns:
            if not (name == "payload" and self._raw):
                check_packable(name, kinds[name])
        self._run_at_micros = isinstance(kinds.get("run_at"), t.TimestampType | t.TimestampNTZType)
        self._name = name_bytes(options.name or "")
        backoff = None
        if options.backoff_kind is not None:
            backoff = Backoff(
                options.backoff_kind,
                options.backoff_delay_ms or 0,
                options.backoff_max_delay_ms,
                options.backoff_multiplier,
                options.backoff_jitter_ms,
            )
        elif "backoff_kind" not in kinds and any(getattr(options, f"backoff_{f}") is not None for f in _BACKOFF):
            raise ConfigError("backoffMaxDelayMs, backoffMultiplier and backoffJitterMs go with backoffKind: give it")
        given = options.max_attempts is not None or backoff is not None
        self._retry = packed_retry(RetryOverride(options.max_attempts, backoff) if given else None)

    def slices(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The batch in pieces that are converted one at a time: memory depends on neither batch nor partition."""
        if not batch.num_rows:
            return
        row_bytes = max(1, batch.nbytes // batch.num_rows)
        rows = max(1, min(SLICE_ROWS, SLICE_BYTES // row_bytes))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)

    def encode(self, batch: pa.RecordBatch, now_ms: int, first_row: int) -> Encoded:
        """The rows of a piece. ``now_ms``: when they are written; ``first_row``: number of the first in its task."""
        bad: dict[int, BadRow] = {}

        def note(row: int, column: str, why: str, reason: str = "malformed") -> None:
            bad.setdefault(row, BadRow(first_row + row, column, why, reason))

        columns = {name: self._converted(batch, name, note) for name in batch.schema.names}
        rows = batch.num_rows
        jobs = Jobs(now_ms, new_ids(rows, now_ms), self._payloads(columns, rows, note), self._name)
        self._names(jobs, columns, note)
        self._retries(jobs, columns, note)
        self._times(jobs, columns, note)
        self._ids(jobs, columns, note)
        self._sizes(jobs, note)
        queues = self._queues(columns, note)
        if bad:
            letters = [self._letter(jobs, queues, row, bad[row]) for row in sorted(bad)]
            kept = [row for row in range(rows) if row not in bad]
            jobs = jobs.where(kept)
            queues = queues if queues is None else [queues[row] for row in kept]
        else:
            letters = []
        return Encoded(self._routed(jobs, queues), letters)

    def _converted(self, batch: pa.RecordBatch, name: str, note: Callable[..., None]) -> list[Any]:
        column = batch.column(name)
        moment = name == "run_at" and pa.types.is_timestamp(column.type)
        if moment:
            column = column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64())
        try:
            return values(column)
        except BAD_VALUES:
            return [self._one(column, row, name, note) for row in range(len(column))]

    def _one(self, column: pa.Array, row: int, name: str, note: Callable[..., None]) -> Any:
        try:
            return values(column.slice(row, 1))[0]
        except BAD_VALUES as error:
            note(row, name, f"{type(error).__name__} {error}"[:200])
            return None

    def _payloads(self, columns: dict[str, list[Any]], rows: int, note: Callable[..., None]) -> list[bytes]:
        if self._raw:
            return payloads_as_given(columns["payload"])
        chosen = [columns[name] for name in self._columns]
        try:
            return payloads_of_values(chosen[0]) if self._payload else payloads_of_rows(self._columns, chosen, rows)
        except BAD_VALUES:
            return [self._one_payload(chosen, row, note) for row in range(rows)]

    def _one_payload(self, chosen: list[list[Any]], row: int, note: Callable[..., None]) -> bytes:
        for name, column in zip(self._columns, chosen, strict=True):
            try:
                payloads_of_values([column[row]])
            except BAD_VALUES as error:
                note(row, name, f"{type(error).__name__} {error}"[:200])
                return b"\xc0"
        if self._payload:
            return payloads_of_values([chosen[0][row]])[0]
        return payloads_of_rows(self._columns, [[column[row]] for column in chosen], 1)[0]

    def _names(self, jobs: Jobs, columns: dict[str, list[Any]], note: Callable[..., None]) -> None:
        given = columns.get("name")
        if given is None:
            return
        known: dict[str | None, bytes | str] = {None: self._name}
        for name in set(given) - {None}:
            try:
                known[name] = name_bytes(name)
            except ConfigError as error:
                known[name] = error.message
        jobs.names = [known[name] for name in given]  # type: ignore[misc]
        if any(type(name) is str for name in known.values()):
            for row, name in enumerate(jobs.names):
                if isinstance(name, str):
                    note(row, "name", name)
            jobs.names = [_cut(given[row] or "") if isinstance(n, str) else n for row, n in enumerate(jobs.names)]

    def _retries(self, jobs: Jobs, columns: dict[str, list[Any]], note: Callable[..., None]) -> None:
        flat = [name for name in _FLAT_RETRY if name in columns]
        if "retry" in columns:
            cells = [None if cell is None else _flattened(cell) for cell in columns["retry"]]
        elif flat:
            options = [getattr(self._options, name) for name in _FLAT_RETRY]
            given = [columns.get(name) or [None] * len(jobs) for name in _FLAT_RETRY]
            cells = [
                tuple(option if cell is None else cell for option, cell in zip(options, row, strict=True))
                for row in zip(*given, strict=True)
            ]
        else:
            jobs.retries = [self._retry] * len(jobs) if self._retry else None
            return
        packed: dict[Any, bytes | ConfigError] = {None: self._retry}
        for cell in {cell for cell in cells if cell is not None}:
            try:
                packed[cell] = packed_retry(_override(cell, is_struct="retry" in columns))
            except ConfigError as error:
                packed[cell] = error
        found = []
        for row, each in enumerate(cells):
            override = packed[each]
            if isinstance(override, ConfigError):
                note(row, "retry" if "retry" in columns else ", ".join(flat), override.message)
                override = b""
            found.append(override)
        jobs.retries = found

    def _times(self, jobs: Jobs, columns: dict[str, list[Any]], note: Callable[..., None]) -> None:
        now, constant, top = jobs.created_at_ms, self._options.delay_ms, self._options.max_delay_secs
        name = "delay_ms" if "delay_ms" in columns else "run_at" if "run_at" in columns else "delayMs"
        cells = columns.get(name)
        if cells is None:
            if not constant:
                return
            cells = [None] * len(jobs)
        unit = 1000 if self._run_at_micros else 1
        found: list[int | None] = []
        for row, cell in enumerate(cells):
            wait = (constant or 0) if cell is None else cell if name == "delay_ms" else cell // unit - now
            if wait < 0 and name == "delay_ms":
                note(row, name, f"expects zero or more, got {wait}")
            elif top and wait // 1000 > top:
                note(row, name, f"the delay of {wait // 1000} s is longer than maxDelaySecs ({top} s)")
                wait = 0
            found.append(now + wait if wait > 0 else None)
        jobs.run_at_ms = found

    def _ids(self, jobs: Jobs, columns: dict[str, list[Any]], note: Callable[..., None]) -> None:
        given = columns.get("id")
        if given is None:
            return
        ids, ttls = list(jobs.ids), [0] * len(jobs)
        times = jobs.run_at_ms or [None] * len(jobs)
        for row, job_id in enumerate(given):
            if job_id is None:
                continue
            try:
                ids[row] = id_bytes(job_id).decode()
                at = times[row]
                ttls[row] = marker_ttl_s(0 if at is None else at - jobs.created_at_ms, self._options.dedup_ttl)
            except ConfigError as error:
                note(row, "id", error.message)
        jobs.ids, jobs.marker_ttls_s = ids, ttls

    def _sizes(self, jobs: Jobs, note: Callable[..., None]) -> None:
        limit = self._options.max_payload_bytes
        beside = _OVERHEAD + max(map(len, jobs.each_retry()), default=0)
        beside += max(map(len, jobs.ids), default=0) * (4 if jobs.marker_ttls_s is not None else 1)
        if max(map(len, jobs.payloads), default=0) + beside <= limit:
            return
        for row, envelope in enumerate(jobs.envelopes()):
            if len(envelope) > limit:
                note(
                    row,
                    "payload" if self._payload else ", ".join(self._columns)[:200],
                    f"the encoded job has {len(envelope)} bytes, more than maxPayloadBytes ({limit}): store the data "
                    f"elsewhere and enqueue a reference, or raise the limit here and in the workers",
                    "oversize_payload",
                )

    def _queues(self, columns: dict[str, list[Any]], note: Callable[..., None]) -> list[str | None] | None:
        """The queue of each row; None where the option names the one of all."""
        if self._options.queue is not None:
            return None
        given = columns["queue"]
        known: dict[Any, str | None] = {}
        for queue in set(given):
            try:
                known[queue] = None if queue is None else checked_queue(queue)
            except ConfigError:
                known[queue] = None
        found = [known[queue] for queue in given]
        for row, queue in enumerate(found):
            if queue is None:
                note(row, "queue", f"expects the name of a queue, got {given[row]!r:.80}")
        return found

    def _routed(self, jobs: Jobs, queues: Sequence[str | None] | None) -> list[tuple[str, Jobs]]:
        if not len(jobs):
            return []
        if queues is None:
            return [(str(self._options.queue), jobs)]
        rows: dict[str, list[int]] = {}
        for row, queue in enumerate(queues):
            rows.setdefault(str(queue), []).append(row)
        if len(rows) == 1:
            return [(str(queues[0]), jobs)]
        return [(queue, jobs.where(chosen)) for queue, chosen in rows.items()]

    def _letter(
        self, jobs: Jobs, queues: Sequence[str | None] | None, row: int, bad: BadRow
    ) -> tuple[BadRow, str | None, Dead]:
        one = jobs[row : row + 1]
        if len(one.payloads[0]) > _LARGEST_LETTER:
            one.payloads = [b"\xc0"]
        queue = self._options.queue if queues is None else queues[row]
        return bad, queue, Dead(one.envelopes()[0], one.each_name()[0], bad.reason, f"{bad.column}: {bad.why}"[:500])


def _check_reserved(name: str, kind: t.DataType) -> None:
    if name == "retry":
        _check_retry(kind)
        return
    expected, words = _EXPECTED[name]
    if not isinstance(kind, (*expected, t.NullType)):
        raise ConfigError(f"column {name} expects {words}, got {kind.simpleString()}: cast it, or rename it")


def _check_retry(kind: t.DataType) -> None:
    words = "struct<max_attempts, backoff struct<kind, delay_ms, max_delay_ms, multiplier, jitter_ms>>"
    if isinstance(kind, t.StructType) and set(kind.names) <= {"max_attempts", "backoff"}:
        inner = {f.name: f.dataType for f in kind}
        backoff = inner.get("backoff", t.NullType())
        fits = isinstance(inner.get("max_attempts", t.NullType()), (*_WHOLE, t.NullType))
        if isinstance(backoff, t.StructType) and set(backoff.names) <= set(_BACKOFF):
            for field in backoff:
                expected, _ = _EXPECTED[f"backoff_{field.name}"]
                fits = fits and isinstance(field.dataType, (*expected, t.NullType))
        elif not isinstance(backoff, t.NullType):
            fits = False
        if fits:
            return
    elif isinstance(kind, t.NullType):
        return
    raise ConfigError(f"column retry expects {words}, any field left out, got {kind.simpleString()}")


def check_packable(path: str, kind: t.DataType) -> None:
    """Refuse a type that MessagePack has no form for; the error names where it is."""
    if isinstance(kind, t.StructType):
        for field in kind:
            check_packable(f"{path}.{field.name}", field.dataType)
    elif isinstance(kind, t.ArrayType):
        check_packable(f"{path}[]", kind.elementType)
    elif isinstance(kind, t.MapType):
        if isinstance(kind.keyType, (t.StructType, t.ArrayType, t.MapType)):
            raise ConfigError(
                f"column {path} has keys of type {kind.keyType.simpleString()}, which a map cannot have there"
            )
        check_packable(f"{path} (keys)", kind.keyType)
        check_packable(f"{path} (values)", kind.valueType)
    elif not isinstance(kind, (*_PACKABLE, *_TIME)):
        raise ConfigError(
            f"column {path} has type {kind.simpleString()}, which a payload cannot hold: cast it to string or a number"
        )


def _flattened(cell: dict[str, Any]) -> tuple[Any, ...]:
    backoff = cell.get("backoff") or {}
    return (cell.get("max_attempts"), *(backoff.get(field) for field in _BACKOFF))


def _override(cell: tuple[Any, ...], *, is_struct: bool) -> RetryOverride | None:
    """What six cells mean; nothing at all where all are null, but for a struct that is there and empty."""
    attempts, kind, delay_ms, max_delay_ms, multiplier, jitter_ms = cell
    if all(value is None for value in cell):
        return RetryOverride() if is_struct else None
    if kind is None and any(value is not None for value in cell[1:]):
        raise ConfigError("a backoff needs its kind: fixed or exponential")
    backoff = None
    if kind is not None:
        if kind not in ("fixed", "exponential"):
            raise ConfigError(f"backoff kind expects fixed or exponential, got {kind!r:.80}")
        if delay_ms is None:
            raise ConfigError("a backoff needs its delay_ms")
        factor = float(multiplier) if isinstance(multiplier, str | Decimal) else multiplier
        backoff = Backoff(kind, delay_ms, max_delay_ms, factor, jitter_ms)
    return RetryOverride(attempts, backoff)


def _cut(name: str) -> bytes:
    return name.encode(errors="replace")[:256].decode(errors="ignore").encode()


def complaint(bad: Sequence[BadRow], partition: int) -> ChasquiError:
    """The error of a task whose rows must all become jobs."""
    more = f" (and {len(bad) - 1} more in this piece)" if len(bad) > 1 else ""
    return ConfigError(
        f"partition {partition}, {bad[0]}{more}. Nothing of the batch was enqueued; mend the row, or set badRows to "
        f"dlq or drop to go on without such rows"
    )
