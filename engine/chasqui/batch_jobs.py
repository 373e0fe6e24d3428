"""What the tasks of a batch read: the jobs of a manifest, from any process, in pages of bounded size."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from chasqui.errors import ChasquiError, CheckpointInUse
from chasqui.protocol import manifests
from chasqui.protocol.columns import JobSpans
from chasqui.protocol.consume import Entry
from chasqui.protocol.keys import Keys
from chasqui.protocol.manifests import Item, Place
from chasqui.protocol.reading import PARSED_AFTER_MISS, PageLength, some_size
from chasqui.redis_io import Link

log = logging.getLogger("chasqui.batches")

Piece: TypeAlias = tuple[int, int, int]
"""Part of a batch: a block, the first job of it, and the one behind the last."""

BEAT_S = 0.5
"""How often a task tells that it lives."""

_BLOCKS_AT_ONCE = 16


class BatchJobs:
    """One batch of a checkpoint, as the driver with that token has planned it."""

    def __init__(self, link: Link, *, queue: str, group: str, sid: str, seq: int, token: int) -> None:
        self.seq = seq
        self._link, self._token = link, token
        self._place = Place(Keys(queue), group, sid)
        self.vanished = 0
        """Jobs that were to be read, and have no record any more."""

    @property
    def queue(self) -> str:
        return self._place.keys.queue

    @property
    def consumer(self) -> str:
        """The name in the group that holds these jobs."""
        return self._place.member.consumer

    @contextmanager
    def task(self, run: str) -> Iterator[bool]:
        """While a task of that Spark run is at work on jobs of the batch: a driver that is stopped meanwhile does not
        give them back. False: the batch is settled or was given back, and nothing is to be read from it.

        A thread tells again and again that the task lives: Spark kills the process of a stopped task some seconds
        later, and nobody else would know when.
        """
        task = uuid.uuid4().hex
        begun = self._link.run(self._place.begin_task(self.seq, self._token, run, task))
        if begun is None:
            raise CheckpointInUse(
                f"another driver has batch {self.seq} of queue {self.queue!r} by now: this task was "
                f"planned by one that was replaced"
            )
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=[over, run, task], name="chasqui-task", daemon=True)
        if begun:
            beating.start()
        try:
            yield begun
        finally:
            if begun:
                over.set()
                beating.join()
                try:
                    self._link.run(self._place.end_task(self.seq, self._token, task))
                except ChasquiError as error:
                    log.info("the end of a task was not noted, its jobs will not be given back: %s", error.message)

    def _beat(self, over: threading.Event, run: str, task: str) -> None:
        while not over.wait(BEAT_S):
            try:
                self._link.run(self._place.begin_task(self.seq, self._token, run, task))
            except Exception as error:  # noqa: BLE001 - the next one may come through
                log.info("a task could not tell that it lives: %s", error)

    def pages(self, pieces: Sequence[Piece]) -> Iterator[list[Entry]]:
        """The records of the jobs in these pieces: entry id, flat fields, deliveries before. What is gone is left
        out.
        """
        yield from self._pages(pieces, None)

    def job_pages(self, pieces: Sequence[Piece]) -> Iterator[list[Entry] | JobSpans]:
        """The same; new jobs that stand side by side and are all of the plain form come as places in their bytes. Needs
        numpy.
        """
        from chasqui.protocol.spans import job_spans

        yield from self._pages(pieces, job_spans)

    def _pages(self, pieces: Sequence[Piece], look: Callable[[bytes], JobSpans | None] | None) -> Iterator[Any]:
        length = PageLength()
        parse = 0  # pages to parse until bytes are looked at again
        for start in range(0, len(pieces), _BLOCKS_AT_ONCE):
            some = pieces[start : start + _BLOCKS_AT_ONCE]
            blocks = self._link.run(self._place.items(self.seq, [block for block, _, _ in some]))
            runs = [items[first:stop] for items, (_, first, stop) in zip(blocks, some, strict=True)]
            while runs:
                chosen, runs = first_of(runs, length.count)
                items = [item for run in chosen for item in run]
                if look and not parse and not any(before for _, before in items):
                    data = self._link.run(manifests.stretch(self._place.keys, items))
                    spans = look(data) if isinstance(data, bytes) else None
                    if spans is not None and spans.all_entry_ids() == [entry_id for entry_id, _ in items]:
                        length.had(length.count, len(spans), len(data))
                        yield spans
                        continue
                    parse = PARSED_AFTER_MISS
                parse = max(0, parse - 1)
                found = self._link.run(manifests.entries(self._place.keys, chosen))
                self.vanished += sum(map(len, chosen)) - len(found)
                if found:
                    length.had(length.count, *some_size(found))
                    yield found


def first_of(runs: Sequence[list[Item]], count: int) -> tuple[list[list[Item]], list[list[Item]]]:
    """The first so many items of these runs, and the rest; what is empty is left out."""
    chosen: list[list[Item]] = []
    rest: list[list[Item]] = []
    for run in runs:
        if count:
            chosen.append(run[:count])
        rest.append(run[count:])
        count -= min(count, len(run))
    return [run for run in chosen if run], [run for run in rest if run]
