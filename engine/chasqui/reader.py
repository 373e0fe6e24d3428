"""Reader: bounded, blocking looks at many queues, for connectors and tools. It changes nothing on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from chasqui.errors import WrongKeyType
from chasqui.job import Stats
from chasqui.options import ConnectionOptions
from chasqui.protocol import observe, reading, schedule
from chasqui.protocol.columns import JobSpans
from chasqui.protocol.flow import Refusal
from chasqui.protocol.keys import Keys, checked_queue
from chasqui.protocol.reading import (
    BEGINNING,
    LAST,
    PAGE_ENTRIES,
    PARSED_AFTER_MISS,
    Id,
    PageLength,
    PendingEntry,
    Position,
    Sample,
    Walk,
    some_size,
)
from chasqui.protocol.replies import parsed
from chasqui.redis_io import Link
from chasqui.repeat import RepeatableMeta

_TIES = 10_000
# Queues asked about in one round trip. Some answers hold whole entries, which may be large.
_TOGETHER = 100

_STREAMS: dict[str, Callable[[Keys], str]] = {
    "jobs": lambda keys: keys.stream,
    "events": lambda keys: keys.events,
    "dlq": lambda keys: keys.dlq,
}


class Reader:
    """Reads queues from outside. ``view`` is ``jobs``, ``events`` or ``dlq``. Threads may share it.

    Ranges are half open: behind ``after``, up to and including ``upto``; both are entry ids, ``0-0`` the beginning.
    A lost connection is tried again as the options say; iterators go on where they were.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        self._link = Link(options)
        self._keys: dict[str, Keys] = {}

    @property
    def shown(self) -> str:
        """Where it reads, without user and password."""
        return self._link.shown

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- Streams ---

    def check(self, view: str, queues: Sequence[str], group: str) -> None:
        """Fail where a view of these queues cannot be read: the server refuses, or a key holds something else."""
        for some in self._together(queues):
            found = self._link.run(reading.first_misplaced(view, [self._of(queue) for queue in some], group))
            if found is not None:
                raise WrongKeyType(
                    f"{found.key} on {self.shown} is a {found.found}, and no {found.wanted} of a queue: another "
                    f"program uses that name; give another queue, or another database in the url"
                )

    def positions(self, view: str, queues: Sequence[str]) -> dict[str, Position | WrongKeyType]:
        """Where each queue's stream stands: one command a queue, in one round trip, or in a cluster one a queue."""
        keys = [self._stream(view, queue) for queue in queues]
        found: list[Position | Refusal] = []
        for some in self._together(keys):
            found += self._link.run(reading.positions(some))
        return {
            queue: WrongKeyType(f"{key} on {self.shown} is no stream: the name of queue {queue!r} is used otherwise")
            if isinstance(one, Refusal)
            else one
            for queue, key, one in zip(queues, keys, found, strict=True)
        }

    def grown(self, view: str, after: Mapping[str, str]) -> bool:
        """Whether something stands behind these ids; next to nothing is sent while there is not."""
        return any(
            self._link.run(
                reading.grown([self._stream(view, queue) for queue in some], [after[queue] for queue in some])
            )
            for some in self._together(list(after))
        )

    def _together(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """What may go in one round trip: in a cluster each queue lives elsewhere."""
        step = 1 if self._link.clustered else _TOGETHER
        return (names[i : i + step] for i in range(0, len(names), step))

    def pages(
        self,
        view: str,
        queue: str,
        after: str = BEGINNING,
        upto: str = "+",
        *,
        before: Callable[[str, int], None] | None = None,
    ) -> Iterator[list[Any]]:
        """The entries of a range, in pages of bounded size: (id, flat list of fields and values) each. ``before`` is
        called before each is asked for, with the id behind which that is, and how many entries came until then.
        """
        yield from self._pages(self._stream(view, queue), after, upto, None, before)

    def job_pages(self, queue: str, after: str = BEGINNING, upto: str = "+") -> Iterator[list[Any] | JobSpans]:
        """The same for jobs: a page whose jobs are all of the plain form comes as places in its bytes. Needs numpy."""
        from chasqui.protocol.spans import job_spans

        yield from self._pages(self._stream("jobs", queue), after, upto, job_spans)

    def _pages(
        self,
        key: str,
        after: str,
        upto: str,
        look: Callable[[bytes], JobSpans | None] | None,
        before: Callable[[str, int], None] | None = None,
    ) -> Iterator[Any]:
        length, parse = PageLength(), 0  # pages to parse until bytes are looked at again
        count = 0
        while after not in (upto, LAST):
            if before is not None:
                before(after, count)
            page: Any
            page, asked = self._link.run(reading.page(key, after, upto, length.count))
            if isinstance(page, bytes):
                data, page = page, None
                if look is not None and not parse:
                    page = look(data)
                    parse = PARSED_AFTER_MISS if page is None else 0
                else:
                    parse = max(0, parse - 1)
                if page is None:
                    page = parsed(data)
            if not page:
                return
            full = len(page) == asked
            count += len(page)
            if isinstance(page, JobSpans):
                last = page.entry_id(-1)
                length.had(asked, len(page), len(page.data))
            else:
                last = page[-1][0]
                length.had(asked, *some_size(page))
            yield page
            if not full:
                return
            after = last.decode()

    def walk(
        self,
        view: str,
        queue: str,
        after: str,
        upto: str,
        *,
        entries: int | None = None,
        size: int | None = None,
        step: int = 1000,
    ) -> Walk:
        """How far so many entries or bytes reach, and the ids at every ``step``; the entries stay where they are."""
        return self._link.run(
            reading.walk(self._stream(view, queue), after, upto, entries=entries, size=size, step=step)
        )

    def probe(self, view: str, queue: str, after: str, upto: str, guesses: Sequence[Id]) -> list[Sample]:
        """What stands around these ids."""
        return self._link.run(reading.probe(self._stream(view, queue), after, upto, guesses))

    # --- Queues ---

    def discover(self, pattern: str) -> list[str]:
        """The queues whose name matches a glob, sorted: those that have jobs, delayed ones, events or dead letters."""
        return _queues_of(self._scan(_keys_of(pattern)))

    def some(self, pattern: str) -> list[str]:
        """Those of them that one step of the search finds, which may be none."""
        for route in self._link.primaries():
            return _queues_of(self._link.run(reading.scanned(_keys_of(pattern), b"0", route))[1])
        return []

    def stats(self, queues: Sequence[str], group: str) -> dict[str, Stats]:
        """The figures of each queue."""
        found: dict[str, Stats] = {}
        for some in self._together(queues):
            figures = self._link.run(observe.stats_of_all([self._of(queue) for queue in some], group))
            found |= dict(zip(some, figures, strict=True))
        return found

    # --- Lists ---

    def pending(self, queue: str, group: str) -> Iterator[list[PendingEntry]]:
        """Jobs that workers have taken and not settled, in pages, the oldest first."""
        after = BEGINNING
        while True:
            page = self._link.run(reading.pending(self._of(queue), group, after, PAGE_ENTRIES))
            if not page:
                return
            yield page
            after = page[-1].entry_id

    def delayed(self, queue: str) -> Iterator[list[tuple[bytes, float]]]:
        """Members of the delayed set with their scores, in pages, the soonest first.

        The promoter takes members away meanwhile, so places in the set shift: pages go on by score. Members of one
        score are told apart by themselves, up to ten thousand of them; beyond that by place.
        """
        least, ties, skip, length = "-inf", set[bytes](), 0, PageLength()
        while True:
            known = len(ties)
            page, asked = self._link.run(reading.delayed(self._of(queue), least, skip, known + length.count, known + 1))
            fresh = [(member, score) for member, score in page if member not in ties]
            if not fresh:
                return
            yield fresh
            last = fresh[-1][1]
            same = {member for member, score in fresh if score == last}
            if repr(last) == least:
                ties |= same
                if len(ties) > _TIES:
                    skip, ties = skip + len(ties), set()
            else:
                least, ties, skip = repr(last), same, 0
            length.had(asked - known, len(fresh), sum(len(member) for member, _ in fresh))

    def repeatable(self, queue: str, limit: int = 100_000) -> list[RepeatableMeta]:
        """The repeat specs of a queue, the next to fire first."""
        return self._link.run(schedule.listed(self._of(queue), limit))

    def results(self, queue: str) -> Iterator[list[tuple[str, bytes, int]]]:
        """Stored results in pages: job id, MessagePack, milliseconds left."""
        keys = self._of(queue)
        prefix = keys.result("")
        length = PageLength()
        for page in self._scan_pages(reading.escaped(prefix) + b"*", prefix):
            names = sorted({key.decode(errors="surrogateescape") for key in page})
            while names:
                some, names = names[: length.count], names[length.count :]
                stored = self._link.run(reading.results(some))
                length.had(length.count, len(some), sum(len(value) for value, _ in stored))
                yield [
                    (name.removeprefix(prefix), value, left)
                    for name, (value, left) in zip(some, stored, strict=True)
                    if left != -2
                ]

    # --- Inside ---

    def _of(self, queue: str) -> Keys:
        found = self._keys.get(queue)
        if found is None:
            found = self._keys[queue] = Keys(queue)
        return found

    def _stream(self, view: str, queue: str) -> str:
        return _STREAMS[view](self._of(queue))

    def _scan(self, pattern: bytes) -> Iterator[bytes]:
        for route in self._link.primaries():
            yield from self._link.run(reading.matching(pattern, route))

    def _scan_pages(self, pattern: bytes, route: str) -> Iterator[list[bytes]]:
        cursor: Any = b"0"
        while True:
            cursor, page = self._link.run(reading.scanned(pattern, cursor, route))
            if page:
                yield page
            if int(cursor) == 0:
                return


def _keys_of(pattern: str) -> bytes:
    return b"{chasqui:" + pattern.encode() + b"}:*"


def _queues_of(keys: Iterable[bytes]) -> list[str]:
    suffixes = (":stream", ":delayed", ":events", ":dlq")
    return sorted({name for name in (queue_of(key, suffixes) for key in keys) if name is not None})


def queue_of(key: bytes, suffixes: Sequence[str]) -> str | None:
    """The queue that a key belongs to, where it is one of those kinds and its name is one that can be used."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return None
    name, brace, kind = text.removeprefix("{chasqui:").partition("}")
    if not brace or kind not in suffixes:
        return None
    try:
        return checked_queue(name)
    except ValueError:
        return None
