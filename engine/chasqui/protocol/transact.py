"""Exactly-once adds in bulk: staged by many, published by one, resumed by whoever comes next.

A *version* of a *writer* (its app id) is one batch. Its life, and where each step is kept:

    stage     tasks set down blocks of jobs under keys of their own attempt, which expire; nothing is visible
    begin     the manifest of the whole batch (queue -> stages) is registered at the writer's home ledger: ``staged``
    adopt     each queue's ledger checks its stages and makes them its own: they no longer expire
    decide    all are adopted: home says ``open``. From here the batch will be published, whoever does it
    publish   slices go from the stages to the stream, the delayed set and the dead letters, with the ledger's cursor
    close     home says ``done``; ledgers and home expire after the ledger TTL

A stage that expired before *decide* ends in *withdraw*: home says ``withdrawn``, all stages and ledgers of that
manifest are removed, and home goes back to the version before. Killed between any two steps, the next driver with the
same or a higher version finds at home what is left to do, and the manifest to do it with; its own stages are of no use
then.

Every step is a script that may be sent again, so a lost reply is no reason to give up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from chasqui.errors import DecodeError, LedgerAhead, LedgerBroken, StageExpired
from chasqui.protocol.blocks import UNIQUE_JOBS, Block, unique_ids
from chasqui.protocol.flow import Arg, Batch, Command, Flow, Pause, Refusal, call_script, command
from chasqui.protocol.keys import AppKeys, Keys
from chasqui.protocol.produce import PASSING, Room
from chasqui.protocol.replies import number, plain
from chasqui.protocol.scripts import SCRIPT_ENTRIES, script

RESET_HINT = "give the writer another txnAppId, or forget the ledger with `chasquictl txn reset`"
# No other client is served while a slice is published: one that took longer than this is followed by a smaller one.
SLICE_MS, SLICE_LEAST, SLICE_FIRST = 8.0, 50, 500
_KEYS_PER_CALL = 500
_ABORTS = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """What one attempt of one task has staged for one queue."""

    id: str
    blocks: int
    rows: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All stages of a batch, by queue. Its id follows from what is in it: the same stages give the same manifest."""

    stages: Mapping[str, Sequence[Stage]]

    @property
    def id(self) -> str:
        return hashlib.sha256(b"".join(self.pieces())).hexdigest()[:32]

    @property
    def rows(self) -> int:
        return sum(stage.rows for stages in self.stages.values() for stage in stages)

    def pieces(self) -> list[bytes]:
        """As it is stored, in values of bounded size."""
        found = []
        for queue in sorted(self.stages):
            stages = sorted(self.stages[queue], key=lambda stage: stage.id)
            for start in range(0, len(stages), SCRIPT_ENTRIES):
                part = [[stage.id, stage.blocks, stage.rows] for stage in stages[start : start + SCRIPT_ENTRIES]]
                found.append(msgpack.packb([queue, part]))
        return found

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> Manifest:
        found: dict[str, list[Stage]] = {}
        try:
            for piece in pieces:
                queue, part = msgpack.unpackb(piece)
                found.setdefault(str(queue), []).extend(Stage(str(i), int(b), int(r)) for i, b, r in part)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise DecodeError(f"a manifest cannot be read: {type(error).__name__} {error}"[:200]) from None
        return cls(found)


@dataclass(frozen=True, slots=True)
class Home:
    """How a writer stands: its latest version, the state of it (staged, open, withdrawn, done), its manifest, and who
    has written it.
    """

    version: int
    state: str
    manifest_id: str
    by: str = ""

    @classmethod
    def read(cls, fields: Sequence[Any]) -> Home | None:
        version, state, manifest_id, by = (plain(field) for field in fields)
        return cls(number(version), state, manifest_id, by) if version else None


@dataclass(frozen=True, slots=True)
class Begun:
    """What begin found: ``ours``, ``other``, ``done``, ``unfinished`` or ``ahead``, and how home stands now."""

    word: str
    home: Home


@dataclass(frozen=True, slots=True)
class Slice:
    """What one call to publish did: its word, the place of the stage at the cursor, jobs published so far, and how
    long it kept the server busy.
    """

    word: str
    place: int
    published: int
    took_ms: float = 0.0


# --- Staging -------------------------------------------------------------------------------------------------------


def put_block(keys: Keys, stage_id: str, number_: int, block: Block, ttl_ms: int) -> Flow[None]:
    """Stage a block under its number: set down twice, after a lost reply, it is there once."""
    key = keys.stage(stage_id)
    yield from _atomically([command("HSET", key, number_, block.data), command("PEXPIRE", key, ttl_ms)])


def discard(keys: Keys, stage_ids: Sequence[str]) -> Flow[None]:
    """Delete stages that nobody has adopted."""
    for start in range(0, len(stage_ids), _KEYS_PER_CALL):
        yield Command(("UNLINK", *map(keys.stage, stage_ids[start : start + _KEYS_PER_CALL])), safe=True)


def discard_manifest(app: AppKeys, manifest: Manifest) -> Flow[None]:
    """Delete a manifest that home has not registered."""
    yield Command(("UNLINK", app.manifest(manifest.id)), safe=True)


def _atomically(commands: Sequence[Command]) -> Flow[list[Any]]:
    """Idempotent commands on one key, in one transaction and one round trip; again where the server said not now."""
    steps = [command("MULTI"), *commands, command("EXEC")]
    for attempt in range(_ABORTS + 1):
        replies = yield Batch(tuple(Command(step.args, safe=True) for step in steps))
        refused = [reply for reply in replies if isinstance(reply, Refusal)]
        if not refused:
            done = list(replies[-1])
            for reply in done:
                if isinstance(reply, Refusal):
                    raise reply
            return done
        # A slot that moves is followed by the driver command by command, which leaves only EXEC refused.
        if attempt == _ABORTS or any(reply.code not in PASSING and reply.code != "EXECABORT" for reply in refused):
            raise next((reply for reply in refused if reply.code != "EXECABORT"), refused[0])
        yield Pause(attempt=attempt)
    raise AssertionError("unreachable")


# --- At home -------------------------------------------------------------------------------------------------------


def standing(app: AppKeys) -> Flow[Home | None]:
    """How the writer stands; None where it has written nothing, or so long ago that it is forgotten."""
    return Home.read((yield command("HMGET", app.home, "version", "state", "manifest", "by", safe=True)))


def begin(
    app: AppKeys, version: int, manifest: Manifest, stage_ttl_ms: int, ledger_ttl_ms: int, by: str = ""
) -> Flow[Begun]:
    """Register a manifest. Its pieces are stored first, where nobody looks for them, and expire if we die here."""
    pieces, manifest_id = manifest.pieces(), manifest.id
    key = app.manifest(manifest_id)
    for number_, piece in enumerate(pieces):
        yield from _atomically([command("HSET", key, number_, piece), command("PEXPIRE", key, stage_ttl_ms)])
    queues = sorted(manifest.stages)
    for start in range(0, len(queues), SCRIPT_ENTRIES):
        some = queues[start : start + SCRIPT_ENTRIES]
        yield from _atomically([command("SADD", app.queues, *some), command("PEXPIRE", app.queues, ledger_ttl_ms)])
    reply = yield from call_script(
        script("begin_version"), [app.home, key, app.queues], [version, manifest_id, len(pieces), by], safe=True
    )
    word, home = plain(reply[0]), Home.read(reply[1:5])
    if word == "torn" or home is None:
        raise StageExpired(
            f"the manifest of version {version} of {app.app_id!r} expired while it was written; nothing was published: "
            f"run the batch again, and raise stageTtl"
        )
    return Begun(word, home)


def read_manifest(app: AppKeys, manifest_id: str) -> Flow[Manifest]:
    """The manifest that home names."""
    key = app.manifest(manifest_id)
    count = number((yield command("HLEN", key, safe=True)))
    pieces = []
    for start in range(0, count, 16):
        part = yield command("HMGET", key, *range(start, min(count, start + 16)), safe=True)
        pieces += [piece for piece in part if piece is not None]
    found = Manifest.of(pieces)
    if found.id != manifest_id:
        raise LedgerBroken(
            f"the manifest of {app.app_id!r} is not whole on the server, so its open version cannot be finished: "
            f"the server has lost data: {RESET_HINT}"
        )
    return found


def decide(app: AppKeys, version: int, manifest_id: str) -> Flow[str]:
    """All is adopted: open the version. The answer is its state, or ``gone``."""
    return plain((yield from call_script(script("decide_version"), [app.home], [version, manifest_id], safe=True)))


def withdraw(app: AppKeys, version: int, manifest_id: str) -> Flow[str]:
    """A stage is gone: give the version up, unless it is open by now. The answer is its state, or ``gone``."""
    return plain((yield from call_script(script("withdraw_version"), [app.home], [version, manifest_id], safe=True)))


def undo(app: AppKeys, version: int, manifest: Manifest, ledger_ttl_ms: int) -> Flow[None]:
    """What follows a withdrawal. Killed in between, the next driver finds home ``withdrawn`` and does it again."""
    for queue, stages in manifest.stages.items():
        keys = Keys(queue)
        for start in range(0, len(stages), _KEYS_PER_CALL):
            part = stages[start : start + _KEYS_PER_CALL]
            reply = yield from call_script(
                script("release_stages"),
                [keys.ledger(app.app_id), *(keys.stage(stage.id) for stage in part)],
                [manifest.id, int(start + len(part) == len(stages))],
                safe=True,
            )
            if not number(reply):
                raise LedgerBroken(
                    f"version {version} of {app.app_id!r} is half published in queue {queue!r}, though its home ledger "
                    f"never opened it; the server has lost data: {RESET_HINT}"
                )
    yield from call_script(
        script("forget_version"),
        [app.home, app.manifest(manifest.id), app.queues],
        [version, manifest.id, ledger_ttl_ms],
        safe=True,
    )


def close(app: AppKeys, version: int, manifest_id: str, ledger_ttl_ms: int) -> Flow[bool]:
    """All queues are published. False where home has gone on without us."""
    keys = [app.home, app.manifest(manifest_id), app.queues]
    reply = yield from call_script(script("close_version"), keys, [version, manifest_id, ledger_ttl_ms], safe=True)
    return number(reply) == 1


def tidy(app: AppKeys, version: int, manifest: Manifest, ledger_ttl_ms: int) -> Flow[None]:
    """What follows a close: the queues' ledgers start to expire, and the manifest goes. Not earlier: a driver that
    resumes a version must find the ledgers of queues that are done. Killed in here, the next driver does it again.
    """
    retire = script("retire_ledger")
    for queue in manifest.stages:
        yield from call_script(retire, [Keys(queue).ledger(app.app_id)], [version, ledger_ttl_ms], safe=True)
    manifest_id = manifest.id
    yield from call_script(
        script("drop_manifest"), [app.home, app.manifest(manifest_id)], [version, manifest_id], safe=True
    )


# --- In a queue ----------------------------------------------------------------------------------------------------


def adopt(app: AppKeys, keys: Keys, version: int, manifest: Manifest) -> Flow[bool]:
    """Make the stages the ledger's. False where this version is published in this queue already, from another
    manifest: home must have been lost, and what is in must not go in again.
    """
    stages = sorted(manifest.stages[keys.queue], key=lambda stage: stage.id)
    ledger, rows, done = keys.ledger(app.app_id), sum(stage.rows for stage in stages), 0
    while done < len(stages):
        part = stages[done : done + _KEYS_PER_CALL]
        args: list[Arg] = [version, manifest.id, done, len(stages), rows, *(stage.blocks for stage in part)]
        reply = yield from call_script(
            script("adopt_stages"), [ledger, *(keys.stage(stage.id) for stage in part)], args, safe=True
        )
        word, value = plain(reply[0]), number(reply[1])
        if word == "done":
            return False
        if word == "expired":
            raise StageExpired(
                f"rows of version {version} of {app.app_id!r} that were staged for queue {keys.queue!r} are gone "
                f"before they were published (stageTtl passed, or the server lost them); nothing of the batch was "
                f"published: run it again"
            )
        if word == "ahead":
            raise ahead(app, version, value, f"queue {keys.queue!r}")
        if word == "unfinished":
            raise LedgerBroken(
                f"queue {keys.queue!r} has version {value} of {app.app_id!r} half published, and the home ledger does "
                f"not know of it; the server has lost data: {RESET_HINT}"
            )
        done = value
    return True


@dataclass(slots=True)
class Work:
    """A queue that is being published: its stages in order, the place of the one at the cursor, and the limits."""

    stages: Sequence[Stage]
    manifest_id: str
    room: Room
    dlq_len: int
    limit: int
    place: int = 0

    @classmethod
    def of(cls, manifest: Manifest, queue: str, room: Room, dlq_len: int, limit: int) -> Work:
        stages = sorted(manifest.stages[queue], key=lambda stage: stage.id)
        return cls(stages, manifest.id, room, dlq_len, limit)


def publish(app: AppKeys, keys: Keys, version: int, work: Work) -> Flow[Slice]:
    """Move one slice; the cursor is the server's, so this may be sent again, and by several at a time."""
    stages = work.stages
    if work.place >= len(stages):
        raise LedgerBroken(f"the ledger of {app.app_id!r} in queue {keys.queue!r} is past the end of its manifest")
    stage = stages[work.place]
    names = [keys.ledger(app.app_id), keys.stage(stage.id), keys.stream, keys.delayed]
    args: list[Arg] = [version, work.manifest_id, work.place, stage.blocks]
    reply = yield from call_script(
        script("publish_slice"),
        [*names, keys.dlq],
        [*args, work.limit, work.room.cap, work.room.trim, work.dlq_len],
        safe=True,
    )
    if plain(reply[0]) == "unique":
        block, first = number(reply[4]), number(reply[5])
        data = yield command("HGET", keys.stage(stage.id), block, safe=True)
        if data is None:  # another driver has just published it
            return Slice("elsewhere", work.place, number(reply[2]))
        markers = [
            key
            for job_id in unique_ids(data, first, min(work.limit, UNIQUE_JOBS))
            for key in (keys.dedup(job_id), keys.delayed_index(job_id))
        ]
        reply = yield from call_script(
            script("publish_unique_slice"),
            [*names, *markers],
            [*args, block, first, work.room.cap, work.room.trim],
            safe=True,
        )
    word, place, published = plain(reply[0]), number(reply[1]), number(reply[2])
    if word == "foreign":
        raise LedgerAhead(
            f"the ledger of {app.app_id!r} in queue {keys.queue!r} is not at version {version} any more: another "
            f"driver has taken over, and this one stops. If there is none, {RESET_HINT}"
        )
    if word == "lost":
        raise LedgerBroken(
            f"staged rows of version {version} of {app.app_id!r} in queue {keys.queue!r} are gone although the ledger "
            f"had adopted them ({published} rows of it are published): the server evicted or lost data. Set "
            f"maxmemory-policy noeviction; to go on without them, {RESET_HINT}"
        )
    return Slice(word, place, published, number(reply[3]) / 1000)


def next_limit(limit: int, took_ms: float) -> int:
    """How many jobs the next slice may have, after one that took so long: nobody else is served meanwhile."""
    if took_ms > SLICE_MS:
        return max(SLICE_LEAST, int(limit * SLICE_MS / 2 / took_ms))
    return min(SCRIPT_ENTRIES, limit * 2) if took_ms < SLICE_MS / 3 else limit


def ahead(app: AppKeys, version: int, found: int, where: str) -> LedgerAhead:
    return LedgerAhead(
        f"version {version} of {app.app_id!r} is lower than version {found}, which {where} has already: the checkpoint "
        f"was deleted, restored or copied, or another driver has taken over. Nothing was written; {RESET_HINT}"
    )


# --- Durability ----------------------------------------------------------------------------------------------------


def confirmed(key: str, timeout_ms: int) -> Flow[bool | None]:
    """Whether the server's disk has everything that was written so far; None where the server cannot tell.

    WAITAOF answers for what its own connection has written, so a write goes before it on the same one.
    """
    replies = yield Batch(
        (
            command("HSET", key, "confirmed", 1, safe=True),
            Command(("WAITAOF", 1, 0, timeout_ms), safe=True, wait_ms=timeout_ms),
            command("HDEL", key, "confirmed", safe=True),
        )
    )
    answer = replies[1]
    if isinstance(replies[0], Refusal):
        raise replies[0]
    if isinstance(answer, Refusal):
        if answer.code in PASSING:
            raise answer
        return None
    return number(answer[0]) >= 1


# --- For people ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """How far a version is published in one queue."""

    queue: str
    version: int
    state: str
    published: int
    rows: int


def queues_of(app: AppKeys) -> Flow[list[str]]:
    """The queues that a writer has ledgers in, as home remembers."""
    return sorted(plain(name) for name in (yield command("SMEMBERS", app.queues, safe=True)))


def ledger_row(app: AppKeys, queue: str) -> Flow[LedgerRow | None]:
    fields = yield command("HMGET", Keys(queue).ledger(app.app_id), "version", "state", "published", "rows", safe=True)
    if fields[0] is None:
        return None
    return LedgerRow(queue, number(fields[0]), plain(fields[1]), number(fields[2]), number(fields[3]))


def forget(app: AppKeys, queues: Sequence[str], manifest: Manifest | None) -> Flow[None]:
    """Remove everything a writer has: home last, so that a reset that was killed can be done again."""
    for queue in sorted({*queues, *(manifest.stages if manifest else ())}):
        keys = Keys(queue)
        if manifest and queue in manifest.stages:
            yield from discard(keys, [stage.id for stage in manifest.stages[queue]])
        yield Command(("DEL", keys.ledger(app.app_id)), safe=True)
    if manifest:
        yield Command(("UNLINK", app.manifest(manifest.id)), safe=True)
    yield Command(("DEL", app.home, app.queues), safe=True)
