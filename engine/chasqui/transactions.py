"""The driver's half of exactly-once adds: commit, abort, and what people ask about it. See protocol/transact.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chasqui.connections import resolve
from chasqui.errors import (
    ConfigError,
    DecodeError,
    LedgerAhead,
    LedgerBroken,
    OptionError,
    QueueFull,
    ServerError,
    StageExpired,
)
from chasqui.options import ConnectionOptions
from chasqui.protocol import transact
from chasqui.protocol.keys import AppKeys, Keys
from chasqui.protocol.produce import Room
from chasqui.protocol.transact import Home, LedgerRow, Manifest, Stage, Work
from chasqui.redis_io import Link
from chasqui.staging import Staged

log = logging.getLogger("chasqui.transactions")

_TELL_EVERY_S = 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5
_CONFIRM_MS = 20_000
_CONFIRMING = 8  # queues of a cluster whose servers are asked at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """How versions are published.

    ``older``: what a version below the last one means: ``fail`` with LedgerAhead, or ``skip``. ``durability``:
    ``fsync`` waits for the server's disk, ``auto`` where the server can tell, ``none`` never.
    """

    overflow: str = "block"
    max_stream_len: int = 1_000_000
    block_timeout_ms: int = 600_000
    dlq_max_stream_len: int = 100_000
    stage_ttl_ms: int = 86_400_000
    ledger_ttl_ms: int = 30 * 86_400_000
    durability: str = "auto"
    older: str = "fail"

    def __post_init__(self) -> None:
        for name in ("max_stream_len", "block_timeout_ms", "dlq_max_stream_len", "stage_ttl_ms", "ledger_ttl_ms"):
            _whole(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Ledger:
    """A writer as the CLI shows it: home's version and state, and how far each queue is."""

    app_id: str
    version: int
    state: str
    queues: tuple[LedgerRow, ...]


class Transactions:
    """Commits and aborts versions of writers. Blocking; each call is safe to make again after any failure."""

    def __init__(self, options: ConnectionOptions, terms: Terms | None = None) -> None:
        self._options = options
        self._terms = terms or Terms()
        self._link = Link(options)

    def __enter__(self) -> Transactions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._link.close()

    def standing(self, app_id: str) -> Home | None:
        """The writer's latest version and its state; None where it has none."""
        return self._link.run(transact.standing(AppKeys(app_id)))

    def commit(
        self,
        app_id: str,
        version: int,
        staged: Sequence[Staged],
        *,
        complete: bool = True,
        rows: int | None = None,
        by: str = "",
    ) -> bool:
        """Publish what the tasks of a version have staged, once. False where the version was there already.

        ``complete`` is False where tasks staged nothing because home had the version then: it must have it now too.
        ``rows``: how many the tasks have seen, for the log. ``by``: who writes under that name; a version that another
        has written is no version come again, and is refused with LedgerAhead.
        """
        app, manifest = AppKeys(app_id), manifest_of(staged)
        _whole("version", version)
        while True:
            if complete:
                begun = self._link.run(
                    transact.begin(app, version, manifest, self._terms.stage_ttl_ms, self._terms.ledger_ttl_ms, by)
                )
                word, home = begun.word, begun.home
            else:
                word, home = self._found(app, version)
            if by and home.by and home.by != by and home.version == version:
                self._discard(app, manifest)
                raise LedgerAhead(
                    f"version {version} of {app_id!r} was written by another query, {home.by}, or from a checkpoint "
                    f"that is gone: a writer's name belongs to one query and its checkpoint. Nothing was written; "
                    f"{transact.RESET_HINT}"
                )
            if word == "ours":
                finished = self._finish(app, home)
                if finished is None:
                    continue
                if not finished:
                    raise StageExpired(
                        f"staged rows of version {version} of {app_id!r} are gone before they were published (stageTtl "
                        f"passed, or the server lost them); nothing of the batch was published: run it again"
                    )
                self._confirm(app)
                return True
            if word == "unfinished":
                log.info("writer %s: finishing version %d before version %d", app_id, home.version, version)
                if self._finish(app, home) is False:
                    log.warning(
                        "writer %s: version %d was staged, never committed, and its rows have expired: it is dropped",
                        app_id,
                        home.version,
                    )
            elif word == "other":
                # A run before this one got as far as the manifest: what it staged is published, ours is not needed.
                finished = self._finish(app, home)
                if finished:
                    self._discard(app, manifest)
                    self._confirm(app)
                    return False
                if finished is False and not complete:
                    raise _not_staged(app, version)
            else:
                self._passed(app, version, word, home, manifest, manifest.rows if rows is None else rows)
                return False

    def abort(self, app_id: str, version: int, staged: Sequence[Staged]) -> None:
        """Delete what the tasks have staged, unless a manifest has adopted it: Spark calls this also after a commit
        that failed half way. Should the commit's last command still be on its way, and register the manifest after we
        looked, the next run finds its stages gone and withdraws it.
        """
        manifest = manifest_of(staged)
        _whole("version", version)
        home = self.standing(app_id)
        if home is not None and home.version == version and home.manifest_id == manifest.id:
            log.info("writer %s: version %d is %s and stays; the next run finishes it", app_id, version, home.state)
            return
        self._discard(AppKeys(app_id), manifest)

    def ledgers(self, app_ids: Iterable[str]) -> list[Ledger]:
        """How those writers stand; those that are not known are left out."""
        found = []
        for app_id in app_ids:
            try:
                ledger = self._ledger(AppKeys(app_id))
            except (DecodeError, ServerError) as error:  # the others are to be seen all the same
                log.warning("writer %s: its ledger cannot be read: %s", app_id, error.message)
                ledger = Ledger(app_id, -1, "unreadable", ())
            if ledger is not None:
                found.append(ledger)
        return found

    def _ledger(self, app: AppKeys) -> Ledger | None:
        home = self._link.run(transact.standing(app))
        queues = self._link.run(transact.queues_of(app))
        rows = [row for queue in queues if (row := self._link.run(transact.ledger_row(app, queue))) is not None]
        if home is None and not rows:
            return None
        version, state = (home.version, home.state) if home else (-1, "lost")
        return Ledger(app.app_id, version, state, tuple(rows))

    def reset(self, app_id: str, *, discard: bool = False) -> bool:
        """Forget a writer, so that its next version may be any; False where there is none. An unfinished version is
        refused, unless ``discard`` says that what is staged of it may be lost.
        """
        app = AppKeys(app_id)
        home = self.standing(app_id)
        queues = self._link.run(transact.queues_of(app))
        if home is None and not queues:
            return False
        manifest = None
        if home is not None and home.state != "done":
            if not discard:
                raise ConfigError(
                    f"version {home.version} of {app_id!r} is {home.state}: its rows are staged and not all published. "
                    f"Run the writer once more to finish it, or discard it (discard=True, --discard), which loses them"
                )
            try:
                manifest = self._link.run(transact.read_manifest(app, home.manifest_id))
            except LedgerBroken as broken:
                log.warning("%s", broken)
        self._link.run(transact.forget(app, queues, manifest))
        return True

    def _found(self, app: AppKeys, version: int) -> tuple[str, Home]:
        """How home stands towards a version that must be there."""
        home = self._link.run(transact.standing(app))
        if home is None or home.version < version:
            raise _not_staged(app, version)
        if home.version > version:
            return "ahead", home
        return ("done" if home.state == "done" else "other"), home

    def _passed(self, app: AppKeys, version: int, word: str, home: Home, manifest: Manifest, rows: int) -> None:
        """The version is there already, or home is past it."""
        if word == "done" and home.manifest_id:
            self._finish(app, home)
        self._discard(app, manifest)
        if word == "ahead" and self._terms.older == "fail":
            raise transact.ahead(app, version, home.version, "its ledger")
        log.warning(
            "writer %s: version %d is skipped, %d rows: version %d is published already",
            app.app_id,
            version,
            rows,
            home.version,
        )
        self._confirm(app)

    def _discard(self, app: AppKeys, manifest: Manifest) -> None:
        """Stages of ours that home has not taken, and the manifest that it would have taken."""
        self._link.run(transact.discard_manifest(app, manifest))
        for queue, stages in manifest.stages.items():
            self._link.run(transact.discard(Keys(queue), [stage.id for stage in stages]))

    def _finish(self, app: AppKeys, home: Home) -> bool | None:
        """Bring a version from wherever it stands to its end. True: it is published. False: it was withdrawn. None:
        another driver has taken it further meanwhile, look again.
        """
        version, ttl = home.version, self._terms.ledger_ttl_ms
        manifest = self._manifest(app, home)
        if manifest is None:
            return None
        state = home.state
        if state == "staged":
            state = self._open(app, version, manifest)
        if state == "withdrawn":
            self._link.run(transact.undo(app, version, manifest, ttl))
            return False
        if state == "gone":
            return None
        if state == "open":
            self._publish(app, version, manifest)
            self._confirm_queues(app, manifest)
            if not self._link.run(transact.close(app, version, manifest.id, ttl)):
                return None
        self._link.run(transact.tidy(app, version, manifest, ttl))
        return True

    def _manifest(self, app: AppKeys, home: Home) -> Manifest | None:
        try:
            return self._link.run(transact.read_manifest(app, home.manifest_id))
        except LedgerBroken:
            if self._link.run(transact.standing(app)) == home:
                raise
            return None

    def _open(self, app: AppKeys, version: int, manifest: Manifest) -> str:
        """Adopt the stages of all queues, then decide. Nothing is published before every queue has its rows."""
        for queue in manifest.stages:
            try:
                if not self._link.run(transact.adopt(app, Keys(queue), version, manifest)):
                    log.warning(
                        "writer %s: queue %s has version %d already, from an earlier run that the home ledger has "
                        "forgotten; its rows of this run are dropped",
                        app.app_id,
                        queue,
                        version,
                    )
            except StageExpired as expired:
                log.warning("%s", expired.message)
                return self._link.run(transact.withdraw(app, version, manifest.id))
        return self._link.run(transact.decide(app, version, manifest.id))

    def _publish(self, app: AppKeys, version: int, manifest: Manifest) -> None:
        """Slice by slice, the queues in turns, so that a full one does not hold up the others."""
        terms, total = self._terms, manifest.rows
        room = Room.of(terms.max_stream_len, terms.overflow, terms.block_timeout_ms)
        works = {
            queue: Work.of(manifest, queue, room, terms.dlq_max_stream_len, transact.SLICE_FIRST)
            for queue in manifest.stages
        }
        published = dict.fromkeys(works, 0)
        told = moved_at = time.monotonic()
        wait_s = _FIRST_WAIT_S
        while works:
            moved = False
            for queue, work in list(works.items()):
                done = self._link.run(transact.publish(app, Keys(queue), version, work))
                published[queue] = max(published[queue], done.published)
                if done.word == "full":
                    continue
                moved = True
                work.place = done.place
                work.limit = transact.next_limit(work.limit, done.took_ms) if done.word == "moved" else work.limit
                if done.word == "done":
                    del works[queue]
            now = time.monotonic()
            if moved:
                moved_at, wait_s = now, _FIRST_WAIT_S
            elif room.block_ms <= (now - moved_at) * 1000:
                raise _full(works, room, sum(published.values()), total)
            else:
                time.sleep(min(wait_s, max(0.0, room.block_ms / 1000 - (now - moved_at))))
                wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
            if works and now - told >= _TELL_EVERY_S:
                told = now
                waiting = "" if moved else f", waiting for room in {', '.join(sorted(works)[:5])}"
                log.info(
                    "writer %s, version %d: %d of %d rows published%s",
                    app.app_id,
                    version,
                    sum(published.values()),
                    total,
                    waiting,
                )

    def _confirm_queues(self, app: AppKeys, manifest: Manifest) -> None:
        """In a cluster queues and home are on different servers: home must not outlive what it says is published.
        On one server its log keeps the order, and one look at the end will do.
        """
        if self._terms.durability == "none" or resolve(self._options).kind != "cluster":
            return
        with ThreadPoolExecutor(_CONFIRMING) as threads:
            list(threads.map(lambda queue: self._confirm_key(Keys(queue).ledger(app.app_id)), manifest.stages))

    def _confirm(self, app: AppKeys) -> None:
        if self._terms.durability != "none":
            self._confirm_key(app.home)

    def _confirm_key(self, key: str) -> None:
        """Wait until the disk of that key's server has all that was written. Also where the version was there before:
        the run that wrote it may have died in this very wait.
        """
        timeout_ms = min(_CONFIRM_MS, max(1, self._options.socket_timeout_ms * 2 // 3))
        confirmed = self._link.run(transact.confirmed(key, timeout_ms))
        if confirmed is None and self._terms.durability == "fsync":
            raise OptionError(
                "durability=fsync expects a server with WAITAOF (Redis 7.2+, Valkey) and appendonly yes, and this one "
                "has not both; the batch is published. Turn AOF on, or set durability to auto or none"
            )
        if confirmed is False:
            raise ServerError(
                f"the batch is published, but the server's disk did not confirm it within {timeout_ms} ms; run it "
                f"again, which publishes nothing twice"
            )


def _whole(name: str, value: int) -> int:
    """Scripts calculate in doubles, which are whole up to 2**53 only."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**53:
        raise ConfigError(f"{name} expects a whole number from 0 to {2**53}, got {value!r:.80}")
    return value


def manifest_of(staged: Sequence[Staged]) -> Manifest:
    """What the tasks of a batch have staged, by queue."""
    found: dict[str, list[Stage]] = {}
    for task in staged:
        for queue, (blocks, rows) in task.queues.items():
            found.setdefault(queue, []).append(Stage(task.stage_id, blocks, rows))
    return Manifest(found)


def _full(works: Mapping[str, Work], room: Room, published: int, total: int) -> QueueFull:
    names = ", ".join(repr(queue) for queue in sorted(works)[:5]) + (", ..." if len(works) > 5 else "")
    how = f" after {room.block_ms} ms of waiting without progress" if room.block_ms else ""
    return QueueFull(
        f"queue {names} holds {room.cap} jobs or more{how}; {published} of {total} rows are published, the others "
        f"are kept and follow when the batch runs again. Let workers drain it, or raise maxStreamLen or blockTimeout"
    )


def _not_staged(app: AppKeys, version: int) -> StageExpired:
    return StageExpired(
        f"version {version} of {app.app_id!r} was in its ledger when the tasks began, so they staged nothing, and is "
        f"not any more: the ledger was reset or lost meanwhile. Nothing was published; run the batch again"
    )
