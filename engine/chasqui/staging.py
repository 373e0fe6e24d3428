"""Setting jobs down on the server so that nobody sees them yet: what each task of a transactional writer does."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from types import TracebackType

from chasqui.errors import ChasquiError
from chasqui.options import ConnectionOptions
from chasqui.protocol import transact
from chasqui.protocol.blocks import Block, BlockBuilder, Dead, Jobs
from chasqui.protocol.keys import AppKeys, Keys
from chasqui.redis_io import Link

# Jobs for many queues wait for company before they are sent; together no more than this.
_HELD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has staged under its id: blocks and rows by queue. Goes to the driver, which commits or aborts."""

    stage_id: str
    queues: dict[str, tuple[int, int]]


class Stager:
    """One attempt of one task. A failed or doubled attempt leaves keys that nobody adopts, and that expire.

    >>> with Stager(options, stage_ttl_ms=86_400_000) as stager:
    ...     stager.add("emails", jobs)
    ...     staged = stager.finish()
    """

    def __init__(self, options: ConnectionOptions, *, stage_ttl_ms: int) -> None:
        self._link = Link(options)
        self._ttl_ms = stage_ttl_ms
        self._id = uuid.uuid4().hex
        self._builders: dict[str, BlockBuilder] = {}
        self._keys: dict[str, Keys] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._held = 0

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            # The task failed: its keys would expire by themselves, but memory is dear. Not at any price: a server
            # that is gone must not keep the task from failing.
            with contextlib.suppress(ChasquiError):
                for queue in self._counts:
                    self._link.run(transact.discard(self._keys[queue], [self._id]))
        self._link.close()

    def is_there(self, app_id: str, version: int, *, older: str) -> bool:
        """Whether the version needs no rows any more. One that is only begun does: its stages may have expired.

        ``older``: what a version below the writer's last one means, ``fail`` with LedgerAhead or ``skip``.
        """
        app = AppKeys(app_id)
        home = self._link.run(transact.standing(app))
        if home is None or home.version < version:
            return False
        if home.version == version:
            return home.state in ("open", "done")
        if older == "fail":
            raise transact.ahead(app, version, home.version, "its ledger")
        return True

    def add(self, queue: str, jobs: Jobs) -> None:
        """Stage jobs; they are sent when a block is full."""
        builder = self._builder(queue)
        self._held -= builder.size
        for block in builder.add(jobs):
            self._send(queue, block)
        self._hold(builder)

    def add_dead(self, queue: str, letter: Dead) -> None:
        """Stage a dead letter."""
        builder = self._builder(queue)
        self._held -= builder.size
        for block in builder.add_dead(letter):
            self._send(queue, block)
        self._hold(builder)

    def finish(self) -> Staged:
        """Send what is left; afterwards all is on the server, for as long as the TTL says."""
        self._flush()
        return Staged(self._id, dict(self._counts))

    def _builder(self, queue: str) -> BlockBuilder:
        if queue not in self._builders:
            self._builders[queue] = BlockBuilder()
            self._keys[queue] = Keys(queue)
        return self._builders[queue]

    def _hold(self, builder: BlockBuilder) -> None:
        self._held += builder.size
        if self._held > _HELD_BYTES:
            self._flush()

    def _flush(self) -> None:
        for queue, builder in self._builders.items():
            for block in builder.rest():
                self._send(queue, block)
        self._held = 0

    def _send(self, queue: str, block: Block) -> None:
        blocks, rows = self._counts.get(queue, (0, 0))
        # Counted before it is sent: should the send fail, the key may exist, and must be found for discarding.
        self._counts[queue] = (blocks + 1, rows + block.rows)
        self._link.run(transact.put_block(self._keys[queue], self._id, blocks, block, self._ttl_ms))
