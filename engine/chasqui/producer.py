"""Producer and AsyncProducer: the same calls in two colours over one set of flows.

What an add promises: when it returns, the job is in the server. With an ``id`` it is there once, however often and
from however many processes it is added within ``dedup_ttl``. When it raises, the error tells what was written.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

import msgpack

from chasqui.errors import ConfigError, DecodeError, PayloadError, ResultTimeout
from chasqui.ids import NewIds, new_ids
from chasqui.job import DelayedJob, DlqEntry, NewJob, Overview, RetryOverride, Stats
from chasqui.options import MOST, ProducerOptions, build
from chasqui.payload import PayloadCodec, too_large
from chasqui.protocol import dead_letters, delays, observe, produce, schedule, survey
from chasqui.protocol.bulk import Bulk, envelope_size
from chasqui.protocol.codec import Envelope, encode_envelope, encode_member, retry_fields
from chasqui.protocol.flow import Flow
from chasqui.protocol.keys import Keys, id_bytes, name_bytes
from chasqui.protocol.specs import StoredSpec, payload_element
from chasqui.redis_io import AsyncLink, Link
from chasqui.repeat import RepeatableMeta, RepeatableSpec

Delay = int | timedelta
When = int | datetime

_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.25
_TRUST_S = 0.1
# Scores and the numbers of scripts are doubles: beyond it they are not whole any more.
_LATEST_MS = 2**53


class Producer:
    """Adds jobs to one queue. Threads may share it; it connects on first use.

    >>> with Producer("redis://127.0.0.1:6379/0", queue="emails") as producer:
    ...     producer.add({"to": "ana@example.org"}, name="welcome")
    """

    def __init__(self, url: str | None = None, *, queue: str = "default", **options: Any) -> None:
        self._plans = _Plans(url, queue, options)
        self._link = Link(self._plans.options)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Producer({self._link.shown!r}, queue={self._plans.options.queue!r})"

    def close(self) -> None:
        """Close all connections."""
        self._link.close()

    @property
    def producer_id(self) -> str:
        """A random id of this object."""
        return self._plans.producer_id

    @property
    def stream_key(self) -> str:
        return self._plans.keys.stream

    @property
    def delayed_key(self) -> str:
        return self._plans.keys.delayed

    @property
    def dlq_key(self) -> str:
        return self._plans.keys.dlq

    def add(self, payload: Any, *, id: str | None = None, name: str = "", retry: RetryOverride | None = None) -> str:
        """Add a job to run now; returns its id."""
        return self._link.run(self._plans.add(payload, id, name, retry, None))

    def add_bulk(self, payloads: Iterable[Any], *, name: str = "", retry: RetryOverride | None = None) -> list[str]:
        """Add many jobs of one name; returns their ids. All are checked and encoded before the first is sent."""
        return self._link.run(self._plans.add_bulk(payloads, name, retry, None, None))

    def add_bulk_named(self, items: Iterable[tuple[str, Any]]) -> list[str]:
        """Add many jobs, each a pair of name and payload."""
        return self._link.run(self._plans.add_bulk_named(items))

    def add_bulk_jobs(self, jobs: Iterable[NewJob]) -> list[str]:
        """Add many jobs, each with its own id, name, retry rules and time."""
        return self._link.run(self._plans.add_bulk_jobs(jobs))

    def add_in(
        self, delay: Delay, payload: Any, *, id: str | None = None, name: str = "", retry: RetryOverride | None = None
    ) -> str:
        """Add a job to run after a delay: milliseconds or a timedelta."""
        return self._link.run(self._plans.add(payload, id, name, retry, _delay_ms(delay)))

    def add_at(
        self, when: When, payload: Any, *, id: str | None = None, name: str = "", retry: RetryOverride | None = None
    ) -> str:
        """Add a job to run at a time: a datetime (naive ones are UTC) or epoch milliseconds."""
        return self._link.run(self._plans.add(payload, id, name, retry, None, run_at_ms=_when_ms(when)))

    def add_in_bulk(
        self,
        delay: Delay,
        payloads: Iterable[Any],
        *,
        ids: Sequence[str] | None = None,
        name: str = "",
        retry: RetryOverride | None = None,
    ) -> list[str]:
        """Add many jobs to run after the same delay, with ids of your own where given."""
        return self._link.run(self._plans.add_bulk(payloads, name, retry, _delay_ms(delay), ids))

    def cancel_delayed(self, id: str) -> bool:
        """Take a delayed job out by the id it was added with; False when it is not there any more."""
        return self._link.run(self._plans.cancel([id]))[0]

    def cancel_delayed_bulk(self, ids: Sequence[str], *, search: bool = False) -> list[bool]:
        """The same for many, in one round trip. ``search``: also ids that were made, and jobs that wait for a retry;
        they are looked for in the whole delayed set.
        """
        return self._link.run(self._plans.cancel(ids, search))

    def promote_delayed(self, ids: Sequence[str]) -> list[bool]:
        """Let delayed jobs run now; False for those that are not delayed (any more)."""
        return self._link.run(self._plans.promote(ids))

    def list_delayed(self, limit: int = 20) -> list[DelayedJob]:
        """The delayed jobs that are due next."""
        return self._link.run(self._plans.list_delayed(limit))

    def peek_dlq(self, limit: int = 20, *, after: str | None = None) -> list[DlqEntry]:
        """The oldest dead letters, or those after the id ``after``; nothing is removed."""
        return self._link.run(self._plans.peek_dlq(limit, after))

    def replay_dlq(self, limit: int = 100, *, ids: Sequence[str] | None = None) -> int:
        """Move dead letters, the oldest or those named, back to the stream with attempt 0; returns how many."""
        return self._link.run(self._plans.replay_dlq(limit, ids))

    def purge_dlq(self, limit: int | None = None, *, ids: Sequence[str] | None = None) -> int:
        """Delete dead letters: all, the oldest ``limit``, or those named; returns how many."""
        return self._link.run(self._plans.purge_dlq(limit, ids))

    def get_result(self, id: str) -> Any:
        """What the job's handler returned; None when there is no result (yet, any more, or ever)."""
        return self._link.run(self._plans.results([id]))[0]

    def get_result_bulk(self, ids: Sequence[str]) -> list[Any]:
        """The same for many, in one round trip."""
        return self._link.run(self._plans.results(ids))

    def wait_for_result(self, id: str, timeout: float | timedelta = 30.0) -> Any:
        """Wait for the job's result, for ``timeout`` seconds; ResultTimeout when none came."""
        deadline = time.monotonic() + _timeout_s(timeout)
        pause = _FIRST_POLL_S
        while True:
            found = self._link.run(self._plans.raw_results([id]))[0]
            if found is not None:
                return self._plans.codec.unpack(found)
            left = deadline - time.monotonic()
            if left <= 0:
                raise _no_result(id, timeout)
            time.sleep(min(left, pause))
            pause = min(pause * 1.5, _LONGEST_POLL_S)

    def stats(self, *, group: str = "default") -> Stats:
        """Figures of the queue; ``pending`` is that group's."""
        return self._link.run(self._plans.stats(group))

    def overview(self, *, group: str = "default") -> Overview:
        """All that can be told about the queue in one round trip: more than ``stats``, and dearer."""
        return self._link.run(self._plans.overview(group))

    def pause(self) -> None:
        """Make workers stop taking jobs, until ``resume``. Adding goes on."""
        return self._link.run(observe.pause(self._plans.keys))

    def resume(self) -> None:
        """End a pause."""
        return self._link.run(observe.resume(self._plans.keys))

    def upsert_repeatable(self, spec: RepeatableSpec) -> str:
        """Store a repeatable job, or overwrite the one of the same key, and count its time anew; returns the key.

        How often it has fired stays. A scheduler, alone or inside a worker, fires it.
        """
        return self._link.run(self._plans.upsert_repeatable(spec))

    def list_repeatable(self, limit: int = 100) -> list[RepeatableMeta]:
        """The repeatable jobs that fire next."""
        return self._link.run(self._plans.list_repeatable(limit))

    def remove_repeatable(self, key: str) -> bool:
        """Remove a repeatable job by its key; False when there is none. Jobs that it has fired stay."""
        return self._link.run(schedule.remove(self._plans.keys, key))


class AsyncProducer:
    """Producer for asyncio: the same calls, awaited."""

    def __init__(self, url: str | None = None, *, queue: str = "default", **options: Any) -> None:
        self._plans = _Plans(url, queue, options)
        self._link = AsyncLink(self._plans.options)

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncProducer({self._link.shown!r}, queue={self._plans.options.queue!r})"

    async def close(self) -> None:
        """Close all connections."""
        await self._link.close()

    @property
    def producer_id(self) -> str:
        """A random id of this object."""
        return self._plans.producer_id

    @property
    def stream_key(self) -> str:
        return self._plans.keys.stream

    @property
    def delayed_key(self) -> str:
        return self._plans.keys.delayed

    @property
    def dlq_key(self) -> str:
        return self._plans.keys.dlq

    async def add(
        self, payload: Any, *, id: str | None = None, name: str = "", retry: RetryOverride | None = None
    ) -> str:
        """Add a job to run now; returns its id."""
        return await self._link.run(self._plans.add(payload, id, name, retry, None))

    async def add_bulk(
        self, payloads: Iterable[Any], *, name: str = "", retry: RetryOverride | None = None
    ) -> list[str]:
        """Add many jobs of one name; returns their ids. All are checked and encoded before the first is sent."""
        return await self._link.run(self._plans.add_bulk(payloads, name, retry, None, None))

    async def add_bulk_named(self, items: Iterable[tuple[str, Any]]) -> list[str]:
        """Add many jobs, each a pair of name and payload."""
        return await self._link.run(self._plans.add_bulk_named(items))

    async def add_bulk_jobs(self, jobs: Iterable[NewJob]) -> list[str]:
        """Add many jobs, each with its own id, name, retry rules and time."""
        return await self._link.run(self._plans.add_bulk_jobs(jobs))

    async def add_in(
        self, delay: Delay, payload: Any, *, id: str | None = None, name: str = "", retry: RetryOverride | None = None
    ) -> str:
        """Add a job to run after a delay: milliseconds or a timedelta."""
        return await self._link.run(self._plans.add(payload, id, name, retry, _delay_ms(delay)))

    async def add_at(
        self, when: When, payload: Any, *, id: str | None = None, name: str = "", retry: RetryOverride | None = None
    ) -> str:
        """Add a job to run at a time: a datetime (naive ones are UTC) or epoch milliseconds."""
        return await self._link.run(self._plans.add(payload, id, name, retry, None, run_at_ms=_when_ms(when)))

    async def add_in_bulk(
        self,
        delay: Delay,
        payloads: Iterable[Any],
        *,
        ids: Sequence[str] | None = None,
        name: str = "",
        retry: RetryOverride | None = None,
    ) -> list[str]:
        """Add many jobs to run after the same delay, with ids of your own where given."""
        return await self._link.run(self._plans.add_bulk(payloads, name, retry, _delay_ms(delay), ids))

    async def cancel_delayed(self, id: str) -> bool:
        """Take a delayed job out by the id it was added with; False when it is not there any more."""
        return (await self._link.run(self._plans.cancel([id])))[0]

    async def cancel_delayed_bulk(self, ids: Sequence[str], *, search: bool = False) -> list[bool]:
        """The same for many, in one round trip. ``search``: also ids that were made, and jobs that wait for a retry;
        they are looked for in the whole delayed set.
        """
        return await self._link.run(self._plans.cancel(ids, search))

    async def promote_delayed(self, ids: Sequence[str]) -> list[bool]:
        """Let delayed jobs run now; False for those that are not delayed (any more)."""
        return await self._link.run(self._plans.promote(ids))

    async def list_delayed(self, limit: int = 20) -> list[DelayedJob]:
        """The delayed jobs that are due next."""
        return await self._link.run(self._plans.list_delayed(limit))

    async def peek_dlq(self, limit: int = 20, *, after: str | None = None) -> list[DlqEntry]:
        """The oldest dead letters, or those after the id ``after``; nothing is removed."""
        return await self._link.run(self._plans.peek_dlq(limit, after))

    async def replay_dlq(self, limit: int = 100, *, ids: Sequence[str] | None = None) -> int:
        """Move dead letters, the oldest or those named, back to the stream with attempt 0; returns how many."""
        return await self._link.run(self._plans.replay_dlq(limit, ids))

    async def purge_dlq(self, limit: int | None = None, *, ids: Sequence[str] | None = None) -> int:
        """Delete dead letters: all, the oldest ``limit``, or those named; returns how many."""
        return await self._link.run(self._plans.purge_dlq(limit, ids))

    async def get_result(self, id: str) -> Any:
        """What the job's handler returned; None when there is no result (yet, any more, or ever)."""
        return (await self._link.run(self._plans.results([id])))[0]

    async def get_result_bulk(self, ids: Sequence[str]) -> list[Any]:
        """The same for many, in one round trip."""
        return await self._link.run(self._plans.results(ids))

    async def wait_for_result(self, id: str, timeout: float | timedelta = 30.0) -> Any:
        """Wait for the job's result, for ``timeout`` seconds; ResultTimeout when none came."""
        deadline = time.monotonic() + _timeout_s(timeout)
        pause = _FIRST_POLL_S
        while True:
            found = (await self._link.run(self._plans.raw_results([id])))[0]
            if found is not None:
                return self._plans.codec.unpack(found)
            left = deadline - time.monotonic()
            if left <= 0:
                raise _no_result(id, timeout)
            await asyncio.sleep(min(left, pause))
            pause = min(pause * 1.5, _LONGEST_POLL_S)

    async def stats(self, *, group: str = "default") -> Stats:
        """Figures of the queue; ``pending`` is that group's."""
        return await self._link.run(self._plans.stats(group))

    async def overview(self, *, group: str = "default") -> Overview:
        """All that can be told about the queue in one round trip: more than ``stats``, and dearer."""
        return await self._link.run(self._plans.overview(group))

    async def pause(self) -> None:
        """Make workers stop taking jobs, until ``resume``. Adding goes on."""
        return await self._link.run(observe.pause(self._plans.keys))

    async def resume(self) -> None:
        """End a pause."""
        return await self._link.run(observe.resume(self._plans.keys))

    async def upsert_repeatable(self, spec: RepeatableSpec) -> str:
        """Store a repeatable job, or overwrite the one of the same key, and count its time anew; returns the key.

        How often it has fired stays. A scheduler, alone or inside a worker, fires it.
        """
        return await self._link.run(self._plans.upsert_repeatable(spec))

    async def list_repeatable(self, limit: int = 100) -> list[RepeatableMeta]:
        """The repeatable jobs that fire next."""
        return await self._link.run(self._plans.list_repeatable(limit))

    async def remove_repeatable(self, key: str) -> bool:
        """Remove a repeatable job by its key; False when there is none. Jobs that it has fired stay."""
        return await self._link.run(schedule.remove(self._plans.keys, key))


class _Plans:
    """Arguments -> flows, checked. The clock and the ids come in here; what is sent is decided below, in protocol."""

    def __init__(self, url: str | None, queue: str, given: dict[str, Any]) -> None:
        self.options = build(ProducerOptions, {"url": url, "queue": queue, **given})
        self.keys = Keys(self.options.queue)
        self.codec = PayloadCodec(
            raw=self.options.raw, datetimes=self.options.datetimes, max_bytes=self.options.max_payload_bytes
        )
        self.room = produce.Room.of(self.options.max_stream_len, self.options.overflow, self.options.block_timeout)
        self.producer_id = str(uuid.uuid4())
        self._length = (0, 0.0)  # of the stream, as last seen and with our adds since; until when to trust it

    def add(
        self,
        payload: Any,
        id: str | None,
        name: str,
        retry: RetryOverride | None,
        delay_ms: int | None,
        run_at_ms: int | None = None,
    ) -> Flow[str]:
        now_ms = _now_ms()
        job = self._new(
            NewJob(payload, id=id, name=name, retry=retry, delay_ms=delay_ms, run_at_ms=run_at_ms), now_ms, None
        )
        if id is not None:
            yield from produce.add_unique(self.keys, self.room, [job])
        elif job.run_at_ms is not None:
            yield from produce.add_delayed(self.keys, job.run_at_ms, job.data, now_ms)
        else:
            yield from produce.add(self.keys, self.room, job.data, job.name)
        return job.id

    def add_bulk(
        self,
        payloads: Iterable[Any],
        name: str,
        retry: RetryOverride | None,
        delay_ms: int | None,
        ids: Sequence[str] | None,
    ) -> Flow[list[str]]:
        given = _listed("payloads", payloads)
        if ids is not None:
            chosen = _listed("ids", ids)
            if len(chosen) != len(given):
                raise ConfigError(f"ids expects one id per payload: {len(given)} payloads, got {len(chosen)} ids")
            jobs = [
                NewJob(payload, id=i, name=name, retry=retry, delay_ms=delay_ms)
                for i, payload in zip(chosen, given, strict=True)
            ]
            return (yield from self.add_bulk_jobs(jobs))
        now_ms = _now_ms()
        run_at_ms = self._run_at(now_ms, delay_ms, None)
        override = _packed_retry(retry)
        packed, sizes = self._pack_all(given, len(override))
        count = len(packed)
        new = NewIds(count, now_ms)
        at = None if run_at_ms is None else [run_at_ms] * count
        names, retries = [name_bytes(name)] * count, [override] * count
        yield from self._feed(self._bulk(now_ms, new, packed, names, retries, at, sizes))
        return new[:]

    def add_bulk_named(self, items: Iterable[tuple[str, Any]]) -> Flow[list[str]]:
        given = _listed("items", items)
        now_ms = _now_ms()
        try:
            payloads = [] if set(map(type, given)) - {tuple, list} else [payload for _, payload in given]
        except ValueError:
            payloads = []
        if len(payloads) != len(given):
            i, item = next(
                (i, item) for i, item in enumerate(given) if type(item) not in (tuple, list) or len(item) != 2
            )
            raise ConfigError(f"items[{i}] expects a pair of name and payload, got {item!r:.80}")
        try:
            distinct = set(map(itemgetter(0), given))
        except TypeError:  # there is one that cannot be hashed
            distinct = {None}
        if set(map(type, distinct)) - {str}:
            i, name = next((i, name) for i, (name, _) in enumerate(given) if type(name) is not str)
            raise ConfigError(f"items[{i}]: name expects text, got {type(name).__name__}")
        encoded = {name: name_bytes(name) for name in distinct}
        packed, sizes = self._pack_all(payloads, 0)
        count = len(packed)
        new = NewIds(count, now_ms)
        # Most bulks are of one name.
        names = [*encoded.values()] * count if len(encoded) == 1 else [encoded[name] for name, _ in given]
        yield from self._feed(self._bulk(now_ms, new, packed, names, [b""] * count, None, sizes))
        return new[:]

    def add_bulk_jobs(self, jobs: Iterable[NewJob]) -> Flow[list[str]]:
        """With any id among them all take the way of ids: one order, and each as safe to send again as the others."""
        given = _listed("jobs", jobs)
        now_ms = _now_ms()
        new = new_ids(len(given), now_ms)
        unique = [self._new(job, now_ms, (i, fresh)) for i, (job, fresh) in enumerate(zip(given, new, strict=True))]
        if any(job.id is not None for job in given):
            yield from produce.add_unique(self.keys, self.room, unique)
            return [job.id for job in unique]
        bulks = []
        for delayed in (False, True):
            chosen = [i for i, job in enumerate(unique) if (job.run_at_ms is not None) is delayed]
            bulks.append(
                self._bulk(
                    now_ms,
                    [new[i] for i in chosen],
                    [self.codec.pack(given[i].payload) for i in chosen],
                    [unique[i].name for i in chosen],
                    [_packed_retry(given[i].retry) for i in chosen],
                    [unique[i].run_at_ms or 0 for i in chosen] if delayed else None,
                )
            )
        yield from self._feed(*bulks)
        return new

    def cancel(self, ids: Sequence[str], search: bool = False) -> Flow[list[bool]]:
        chosen = self._ids(ids)
        if not chosen:
            return []
        cancelled = yield from produce.cancel_delayed(self.keys, chosen)
        missed = [job_id for job_id, done in zip(chosen, cancelled, strict=True) if not done]
        if not search or not missed:
            return cancelled
        found = dict(zip(missed, (yield from delays.take_out(self.keys, missed)), strict=True))
        return [done or found[job_id] for job_id, done in zip(chosen, cancelled, strict=True)]

    def promote(self, ids: Sequence[str]) -> Flow[list[bool]]:
        return (yield from delays.promote(self.keys, self.room, self._ids(ids)))

    def list_delayed(self, limit: int) -> Flow[list[DelayedJob]]:
        return (yield from delays.listed(self.keys, self.codec, _count("limit", limit)))

    def peek_dlq(self, limit: int, after: str | None) -> Flow[list[DlqEntry]]:
        count = _count("limit", limit)
        if after is not None:
            _entry_id("after", after)
        return (yield from dead_letters.peek(self.keys, self.codec, count, after)) if count else []

    def replay_dlq(self, limit: int, ids: Sequence[str] | None) -> Flow[int]:
        count = _count("limit", limit)
        chosen = _entry_ids(ids)
        return (
            yield from dead_letters.replay(
                self.keys, count if chosen is None else len(chosen), chosen, self.room.cap, self.room.trim
            )
        )

    def purge_dlq(self, limit: int | None, ids: Sequence[str] | None) -> Flow[int]:
        count = None if limit is None else _count("limit", limit)
        return (yield from dead_letters.purge(self.keys, count, _entry_ids(ids)))

    def results(self, ids: Sequence[str]) -> Flow[list[Any]]:
        chosen = self._ids(ids)
        found = yield from self.raw_results(chosen)
        return [None if data is None else self._result(i, data) for i, data in zip(chosen, found, strict=True)]

    def _result(self, job_id: str, data: bytes) -> Any:
        try:
            return self.codec.unpack(data)
        except DecodeError as error:
            raise DecodeError(f"the result of job {job_id!r:.80}: {error.message}") from None

    def raw_results(self, ids: Sequence[str]) -> Flow[list[Any]]:
        chosen = self._ids(ids)
        return (yield from observe.results(self.keys, chosen)) if chosen else []

    def stats(self, group: str) -> Flow[Stats]:
        if not isinstance(group, str) or not group:
            raise ConfigError(f"group expects a name, got {group!r:.80}")
        return (yield from observe.stats(self.keys, group))

    def overview(self, group: str) -> Flow[Overview]:
        if not isinstance(group, str) or not group:
            raise ConfigError(f"group expects a name, got {group!r:.80}")
        return (yield from survey.overview(self.keys, group))

    def upsert_repeatable(self, spec: RepeatableSpec) -> Flow[str]:
        if not isinstance(spec, RepeatableSpec):
            raise ConfigError(f"spec expects a RepeatableSpec, got {type(spec).__name__}")
        name_bytes(spec.job_name)
        spec.pattern.check()
        payload = self._checked_size(self.codec.pack(spec.payload), len(_packed_retry(spec.retry)))
        now_ms = _now_ms()
        first_ms = spec.first_fire_ms(now_ms)
        stored = StoredSpec(
            key=schedule.checked_key(spec.resolved_key),
            job_name=spec.job_name,
            pattern=spec.pattern,
            element=payload_element(payload),
            limit=spec.limit,
            start_after_ms=spec.start_after_ms,
            end_before_ms=spec.end_before_ms,
            missed_fires=spec.missed_fires,
            retry=spec.retry,
        )
        yield from schedule.upsert(self.keys, stored, first_ms, now_ms)
        return stored.key

    def list_repeatable(self, limit: int) -> Flow[list[RepeatableMeta]]:
        count = _count("limit", limit)
        return (yield from schedule.listed(self.keys, count)) if count else []

    def _bulk(
        self,
        now_ms: int,
        ids: Sequence[str],
        packed: Sequence[bytes],
        names: Sequence[bytes],
        retries: Sequence[bytes],
        run_at_ms: Sequence[int] | None,
        sizes: Sequence[int] | None = None,
    ) -> Bulk:
        target = self.keys.stream if run_at_ms is None else self.keys.delayed
        return Bulk(target, now_ms, ids, packed, names, retries, run_at_ms, self.room.trim, sizes)

    def _feed(self, *bulks: Bulk) -> Flow[None]:
        """Send what is in them, after a look at the cap. Far below it, and seen so just now, the look is saved: others
        would have to add half a queue within that moment.
        """
        given = [bulk for bulk in bulks if len(bulk)]
        for_stream = sum(len(bulk) for bulk in given if bulk.run_at_ms is None)
        length, until = self._length
        now = time.monotonic()
        trusted = now < until and length + for_stream <= self.room.cap // 2
        room = produce.Room(0, self.room.trim, 0) if trusted else self.room
        seen = yield from produce.add_bulks(self.keys, room, given, self.options.reconnect_attempts)
        self._length = (length + for_stream, until) if seen is None else (seen + for_stream, now + _TRUST_S)

    def _new(self, job: NewJob, now_ms: int, bulk: tuple[int, str] | None) -> produce.UniqueJob:
        """One job, checked and encoded. In a bulk: its place, for the error, and the id it gets if it brings none."""
        try:
            if not isinstance(job, NewJob):
                raise ConfigError(f"expects NewJob, got {type(job).__name__}")
            minted = job.id is None
            job_id = bulk[1] if bulk and minted else new_ids(1, now_ms)[0] if minted else id_bytes(job.id).decode()
            name = name_bytes(job.name)
            run_at_ms = self._run_at(now_ms, job.delay_ms, job.run_at_ms)
            envelope = encode_envelope(
                Envelope(job_id, self.codec.pack(job.payload), now_ms, 0, _checked_retry(job.retry))
            )
            if len(envelope) > self.options.max_payload_bytes:
                raise too_large(len(envelope), self.options.max_payload_bytes)
        except (ConfigError, PayloadError) as error:
            if bulk is None:
                raise
            raise type(error)(f"jobs[{bulk[0]}]: {error.message}") from None
        delay = 0 if run_at_ms is None else run_at_ms - now_ms
        ttl = produce.OWN_MARKER_TTL_S if minted else produce.marker_ttl_s(delay, self.options.dedup_ttl)
        return produce.UniqueJob(
            job_id, envelope if run_at_ms is None else encode_member(name, envelope), name, ttl, run_at_ms
        )

    def _run_at(self, now_ms: int, delay_ms: int | None, run_at_ms: int | None) -> int | None:
        """When a job may run; None for now, which is also what a time in the past means."""
        if delay_ms is None and run_at_ms is None:
            return None
        if delay_ms is not None and run_at_ms is not None:
            raise ConfigError("delay_ms and run_at_ms exclude each other: give one")
        wait = _delay_ms(delay_ms, "delay_ms") if delay_ms is not None else _when_ms(run_at_ms, "run_at_ms") - now_ms
        limit = self.options.max_delay_secs
        if limit and wait // 1000 > limit:
            raise ConfigError(f"the delay of {wait // 1000} s is longer than max_delay_secs ({limit} s)")
        if now_ms + wait > _LATEST_MS:
            what = "delay_ms" if delay_ms is not None else "run_at_ms"
            raise ConfigError(
                f"{what} expects a time that the server can tell to the millisecond: at most {_LATEST_MS}"
            )
        return now_ms + wait if wait > 0 else None

    def _pack_all(self, payloads: Sequence[Any], retry_size: int) -> tuple[list[bytes], list[int]]:
        """All payloads and their sizes, before any of them is sent. The common case is a loop in C; the slow one finds
        the culprit.
        """
        if not self.codec.raw and not self.codec.datetimes:
            try:
                packed = list(map(msgpack.Packer(use_bin_type=True).pack, payloads))
                sizes = list(map(len, packed))
                if envelope_size(max(sizes, default=0), retry_size) <= self.options.max_payload_bytes:
                    return packed, sizes
            except (TypeError, ValueError, OverflowError, RecursionError):
                pass
        packed = []
        for i, payload in enumerate(payloads):
            try:
                packed.append(self._checked_size(self.codec.pack(payload), retry_size))
            except PayloadError as error:
                raise PayloadError(f"payloads[{i}]: {error.message}") from None
        return packed, list(map(len, packed))

    def _checked_size(self, data: bytes, retry_size: int) -> bytes:
        size = envelope_size(len(data), retry_size)
        if size > self.options.max_payload_bytes:
            raise too_large(size, self.options.max_payload_bytes)
        return data

    def _ids(self, ids: Sequence[str]) -> list[str]:
        return [id_bytes(i).decode() for i in _listed("ids", ids)]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _listed(what: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise ConfigError(f"{what} expects a list or another iterable, got {type(values).__name__}")
    return list(values)


def _checked_retry(retry: Any) -> RetryOverride | None:
    if retry is not None and not isinstance(retry, RetryOverride):
        raise ConfigError(f"retry expects a RetryOverride, got {type(retry).__name__}")
    return retry


def _packed_retry(retry: Any) -> bytes:
    checked = _checked_retry(retry)
    return b"" if checked is None else bytes(msgpack.packb(retry_fields(checked)))


def _delay_ms(delay: Any, what: str = "delay") -> int:
    if isinstance(delay, timedelta):
        delay = delay // timedelta(milliseconds=1)
    if isinstance(delay, bool) or not isinstance(delay, int):
        raise ConfigError(f"{what} expects milliseconds or a timedelta, got {type(delay).__name__}")
    if delay < 0:
        raise ConfigError(f"{what} expects zero or more, got {delay}")
    return delay


def _when_ms(when: Any, what: str = "when") -> int:
    if isinstance(when, datetime):
        aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    if isinstance(when, bool) or not isinstance(when, int):
        raise ConfigError(f"{what} expects a datetime or epoch milliseconds, got {type(when).__name__}")
    if when < 0:
        raise ConfigError(f"{what} expects a time after 1970, got {when}")
    return when


def _timeout_s(timeout: Any) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"timeout expects seconds, more than zero, or a timedelta; got {timeout!r:.80}")
    return float(seconds)


def _no_result(job_id: str, timeout: float | timedelta) -> ResultTimeout:
    return ResultTimeout(
        f"no result of job {job_id!r:.80} within {timeout}: it may still run, have failed, or its worker may not store "
        f"results (store_results)"
    )


def _count(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ConfigError(f"{what} expects a whole number from 0 to {MOST}, got {value!r:.80}")
    return value


def _entry_ids(ids: Any) -> list[str] | None:
    return None if ids is None else [_entry_id(f"ids[{i}]", entry) for i, entry in enumerate(_listed("ids", ids))]


def _entry_id(what: str, value: Any) -> str:
    ms, dash, seq = value.partition("-") if isinstance(value, str) else ("", "", "")
    if not (dash and all(p.isascii() and p.isdecimal() and len(p) <= 20 and int(p) < 2**64 for p in (ms, seq))):
        raise ConfigError(f"{what} expects an entry id such as 1794978715257-0, got {value!r:.80}")
    return str(value)
