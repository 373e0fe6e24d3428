"""What the tasks of a batch read: the jobs of a manifest, from any process, in pages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from chasqui.protocol import manifests
from chasqui.protocol.consume import Entry
from chasqui.protocol.keys import Keys
from chasqui.protocol.manifests import Place
from chasqui.redis_io import Link

Piece: TypeAlias = tuple[int, int, int]
"""Part of a batch: a block, the first job of it, and the one behind the last."""

_PAGE_BYTES = 4 << 20


class BatchJobs:
    """One batch of a checkpoint."""

    def __init__(self, link: Link, *, queue: str, group: str, sid: str, seq: int) -> None:
        self._link, self._seq = link, seq
        self._place = Place(Keys(queue), group, sid)

    @property
    def consumer(self) -> str:
        """The name in the group that holds these jobs."""
        return self._place.member.consumer

    def began(self, run: str) -> None:
        """Note that tasks of that Spark run have begun to read: from now on it may be committed."""
        self._link.run(self._place.began(self._seq, run))

    def pages(self, pieces: Sequence[Piece]) -> Iterator[list[Entry]]:
        """The records of the jobs in these pieces: entry id, flat fields, deliveries before. What is gone is left
        out.
        """
        for block, start, stop in pieces:
            items = self._link.run(self._place.items(self._seq, [block]))[0][start:stop]
            while items:
                found, covered = self._link.run(manifests.entries(self._place.keys, items, _PAGE_BYTES))
                items = items[covered:]
                if found:
                    yield found
