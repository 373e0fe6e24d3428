"""A Spark driver's hold on jobs: it leases a checkpoint's place, takes jobs into manifests, keeps the claims alive
while Spark runs the batch, and settles what Spark has committed. Blocking; a thread of its own renews.

Killed at any point: what is in a manifest is found again by the driver that comes next; what is in none has not been
taken. Server gone: calls try for as long as the connection options say, then the query fails and is started again by
whoever looks after it; the thread goes on by itself.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from chasqui.errors import ChasquiError, CheckpointInUse, ConfigError, DecodeError, ServerError
from chasqui.options import ConnectionOptions, Settling, build, check, option
from chasqui.outcomes import RETRY, Outcome, Outcomes
from chasqui.protocol import manifests
from chasqui.protocol.codec import decode_envelope
from chasqui.protocol.consume import FORGET_IDLE_MS, DeadLetter
from chasqui.protocol.flow import Flow
from chasqui.protocol.keys import Keys
from chasqui.protocol.manifests import Item, Place
from chasqui.protocol.replies import fields
from chasqui.protocol.scripts import SCRIPT_BYTES, SCRIPT_ENTRIES
from chasqui.redis_io import Link

log = logging.getLogger("chasqui.claims")
T = TypeVar("T")

STOPPED, FAILED = "stopped", "failed"
_RELEASED, _DISSOLVED = "released", "dissolved"
_POLL_S = 0.05
_SLICES_AT_ONCE = 4
_UNKNOWN = -math.inf
_FORGET_EVERY_S = 3600.0
_SILENT_MS = 3000
"""A task that was not heard of for so long is dead. It tells twice a second that it lives, until its process ends."""


@dataclass(frozen=True, kw_only=True)
class SettleTerms(Settling):
    """How the jobs of a session are settled. Written into the session, so that whoever learns of a commit can act."""

    ack: str = option("commit", choices=("commit", "settle"), help="Jobs are done when committed, or as outcomes say.")
    leftover: str = option(
        "retry", choices=("retry", "ok", "release"), help="`ack=settle`: what becomes of jobs without an outcome."
    )

    def __post_init__(self) -> None:
        check(self)

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> SettleTerms:
        try:
            found = json.loads(text)
            return build(cls, found if isinstance(found, dict) else {})
        except ValueError as error:
            raise DecodeError(f"the session's terms are not readable: {error}"[:200]) from None


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch to be run: how many jobs each of its blocks holds, from block 1, and how many were struck out. Its tasks
    show the token.
    """

    sizes: tuple[int, ...] = ()
    dropped: int = 0
    token: int = 0


class Claims:
    """One checkpoint's jobs, on any number of queues of one server."""

    def __init__(
        self,
        connection: ConnectionOptions,
        *,
        sid: str,
        terms: SettleTerms,
        lease_ttl_ms: int = 15_000,
        max_batch_runs: int = 5,
        label: str = "",
    ) -> None:
        self.sid = sid
        self._connection, self._terms = connection, terms
        self._ttl_ms, self._max_runs, self._label = lease_ttl_ms, max_batch_runs, label
        self._link = Link(connection)
        # The heart must not wait for connections that planning holds, nor for an answer until the lease has lapsed.
        self._heart_link = Link(_quick(connection, min(lease_ttl_ms, terms.claim_min_idle_ms) // 3))
        self._holder = uuid.uuid4().hex
        self.claimed_bytes = 0
        """Of what the last call of ``claim`` has taken."""
        self._lock = threading.RLock()  # a signal handler may come in between
        self._tokens: dict[str, int] = {}
        self._in_flight: dict[tuple[str, int], float] = {}  # and when its claims were last known to be fresh
        self._mine: set[tuple[str, int]] = set()  # taken by this process, and nothing of it lost since
        self._planned: set[tuple[str, int]] = set()
        self._looked: dict[str, int] = {}
        self._next_stale: dict[str, float] = {}
        self._next_forget: dict[str, float] = {}
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    # The lease.

    def hold(self, queue: str) -> None:
        """Take the lease on a queue. A driver that died may still have it: then this waits until it lapses, and is
        refused only if it was renewed meanwhile, which only a driver does that lives.
        """
        if queue in self._tokens:
            return
        place = self._place(queue)
        group = _group_in(self._link.run(place.terms()))
        if group not in (None, self._terms.group):
            raise ConfigError(
                f"group expects {group!r}, as which this checkpoint has taken jobs of queue {queue!r}, got "
                f"{self._terms.group!r}: give that group, or another checkpointLocation"
            )
        seen = ""
        while True:
            lease = self._link.run(place.take(self._holder, self._ttl_ms, self._label, self._terms.text()))
            if lease.token is not None:
                break
            if seen and lease.until != seen:
                raise self._in_use(queue)
            if not seen:
                log.info("queue %r: a driver of this checkpoint has %d ms left; waiting", queue, lease.left_ms)
            seen = lease.until
            self._stop.wait((lease.left_ms + 5) / 1000)
        self._link.run(place.member.ensure_group())
        with self._lock:
            self._tokens[queue] = lease.token
        if self._heart is None or not self._heart.is_alive():
            self._heart = threading.Thread(target=self._beat, name="chasqui-claims", daemon=True)
            self._heart.start()

    def _token(self, queue: str) -> int:
        self.hold(queue)
        return self._tokens[queue]

    def _fenced(self, queue: str) -> None:
        """Our token is refused: another driver has the place, or the server has lost its data."""
        with self._lock:
            self._tokens.pop(queue, None)
        if self._link.run(self._place(queue).terms()) is not None:
            raise self._in_use(queue)
        log.warning("queue %r: the session is gone from the server; starting it again", queue)

    def _in_use(self, queue: str) -> CheckpointInUse:
        return CheckpointInUse(
            f"another driver takes jobs of queue {queue!r} for the same checkpoint: stop one of the two, or give each "
            f"query a checkpointLocation of its own"
        )

    def _place(self, queue: str) -> Place:
        return Place(Keys(queue), self._terms.group, self.sid)

    # Taking.

    def claim(self, queue: str, seq: int, *, limit: int, max_bytes: int | None = None, upto: str = "") -> int:
        """Take up to ``limit`` jobs into manifest ``seq`` and close it; how many it holds.

        One that is there already, because a driver died between this and Spark's log, is closed as it is.
        """
        place, token = self._place(queue), self._token(queue)
        self.claimed_bytes = 0
        if self._looked.get(queue) != seq:
            self._looked[queue] = seq
            if self._link.run(place.exists(seq)) and (found := self._seal(queue, seq)):
                return found
        # Known to the heart, and to who gives jobs back, before the server may have given us some.
        with self._lock:
            self._in_flight[queue, seq] = time.monotonic()
            self._mine.add((queue, seq))
        jobs = self._fill(place, seq, token, limit, max_bytes, upto)
        if not jobs:
            self._drop(queue, seq)
        if jobs is None:
            self._fenced(queue)
            return 0
        return self._seal(queue, seq) if jobs else 0

    def _drop(self, queue: str, seq: int) -> None:
        """Nothing of that batch is in our hands any more."""
        with self._lock:
            self._in_flight.pop((queue, seq), None)
            for known in (self._mine, self._planned):
                known.discard((queue, seq))

    def _fill(self, place: Place, seq: int, token: int, limit: int, max_bytes: int | None, upto: str) -> int | None:
        queue, min_idle_ms = place.keys.queue, self._terms.claim_min_idle_ms
        jobs = 0
        # With a limit in bytes one slice at a time: each has the room that those before it have left.
        slices = min(_SLICES_AT_ONCE, -(-limit // SCRIPT_ENTRIES)) if max_bytes is None else 1
        room = SCRIPT_BYTES if max_bytes is None else max_bytes
        for idle_ms in [min_idle_ms, 0] if time.monotonic() >= self._next_stale.get(queue, 0.0) else [0]:
            while True:
                claim = partial(place.claim, seq, token, limit, min_idle_ms=idle_ms, upto=upto)
                taken = with_group(self._link, place, partial(claim, slices=slices, room=room))
                if taken is None:
                    return None
                jobs, self.claimed_bytes = taken.jobs, taken.size
                if max_bytes is not None:
                    room = max_bytes - taken.size
                    if room <= 0:
                        return jobs
                if not taken.now or jobs >= limit:
                    break
            if idle_ms and not taken.now:
                # Nothing stale is left. While there is, the next batch looks again at once. A run that has an end must
                # not go on for ever with what it gives back itself.
                self._next_stale[queue] = math.inf if upto else time.monotonic() + min_idle_ms / 3000
        return jobs

    def _seal(self, queue: str, seq: int) -> int:
        found = self._link.run(self._place(queue).seal(seq, self._token(queue)))
        if found is None:
            self._fenced(queue)
            return 0
        if found:
            with self._lock:
                self._in_flight.setdefault((queue, seq), _UNKNOWN)
        return found

    # Running.

    def plan(self, queue: str, seq: int) -> Planned:
        """Make a batch ready to be run, also one that a driver before us took. Nothing where it is gone or released."""
        place, token = self._place(queue), self._token(queue)
        plan = self._planned_batch(place, seq, token)
        if plan is False:
            self._fenced(queue)
            return self.plan(queue, seq)
        if not isinstance(plan, manifests.Plan):
            log.warning("queue %r: batch %d is not on the server any more; its jobs are taken anew", queue, seq)
            return Planned()
        if plan.state:
            log.info("queue %r: batch %d was %s; nothing is read from it", queue, seq, plan.state)
            return Planned()
        with self._lock:
            self._in_flight.setdefault((queue, seq), _UNKNOWN)
            self._planned.add((queue, seq))
        dropped = 0
        if plan.new and not self._is_fresh(queue, seq):
            again = partial(place.revalidate, seq, token, plan.blocks, self._terms.claim_min_idle_ms)
            found = with_group(self._link, place, again)
            if found is None:
                self._fenced(queue)
                return self.plan(queue, seq)
            dropped = found
            if dropped:
                log.warning("queue %r: %d jobs of batch %d are settled or with others by now", queue, dropped, seq)
        if plan.jobs == dropped:
            return Planned((), dropped, token)
        if plan.runs > self._max_runs:
            self._dissolve(place, seq, token, replace(plan, jobs=plan.jobs - dropped))
            return Planned((), dropped, token)
        return Planned(tuple(self._link.run(place.sizes(seq, plan.blocks))), dropped, token)

    def _planned_batch(self, place: Place, seq: int, token: int) -> manifests.Plan | bool | None:
        """Tasks of a driver that was stopped or killed just now run on for some seconds: their jobs are not run beside
        them.
        """
        waiting = False
        while True:
            plan = self._link.run(place.plan(seq, token, self._holder, _SILENT_MS))
            if not isinstance(plan, manifests.Plan) or not plan.wait_ms:
                return plan
            if not waiting:
                log.info("queue %r: tasks of the driver before are at work on batch %d; waiting", place.keys.queue, seq)
            waiting = True
            time.sleep(min(plan.wait_ms, 200) / 1000)

    def _is_fresh(self, queue: str, seq: int) -> bool:
        """Whether nobody else can have taken jobs of that batch."""
        with self._lock:
            since = time.monotonic() - self._in_flight.get((queue, seq), _UNKNOWN)
            return (queue, seq) in self._mine and since * 1000 < self._terms.claim_min_idle_ms / 2

    def _dissolve(self, place: Place, seq: int, token: int, plan: manifests.Plan) -> None:
        """A batch that never comes to its end holds a job that kills its process. Which one shows in smaller batches;
        one alone in its batch is it.
        """
        queue, runs = place.keys.queue, plan.runs - 1
        if plan.jobs > 1:
            log.warning("queue %r: batch %d was run %d times in vain: its %d jobs go on in batches of a tenth",
                        queue, seq, runs, plan.jobs)  # fmt: skip
            release = partial(place.release, seq, token, plan.blocks, min_idle_ms=self._terms.claim_min_idle_ms)
            with_group(self._link, place, partial(release, state=_DISSOLVED, narrow=max(1, plan.jobs // 10)))
            self._drop(queue, seq)
            self._next_stale.pop(queue, None)
            return
        log.warning("queue %r: the only job of batch %d ended its process %d times: given up", queue, seq, runs)
        blocks = list(_blocks(self._link, place, seq))
        entries = self._link.run(manifests.entries(place.keys, blocks))
        letters = []
        for entry_id, flat, _ in entries:
            data, name = fields(flat).get(b"d", b""), fields(flat).get(b"n", b"")
            try:
                job_id = decode_envelope(data).id
            except DecodeError:
                job_id = ""
            error = f"the job was alone in a batch that was run {runs} times and never came to its end"
            letters.append(DeadLetter(entry_id, data, name, "retries_exhausted", runs, job_id, error=error))
        Outcomes(self._link, queue, self._terms).bury(letters, place.member.consumer, self._terms.group)

    # Ending.

    def settle(self, queue: str, seq: int) -> None:
        """Spark has committed this batch."""
        settle(self._link, queue, self.sid, seq, self._terms)
        self._drop(queue, seq)

    def leave(self, grace_s: float, linger_s: float = 0.0, tasks_s: float = 12.0) -> int:
        """The query was stopped: give back what it had taken and not committed; how many jobs that was.

        Whether Spark committed the last batch only the listener knows, which hears of every commit before it hears of
        the end. So this waits for its word, for ``grace_s`` at most, and then until the tasks have ended or fallen
        silent: for ``linger_s`` at least, because jobs may be at work behind the tasks that have read them, and for
        ``tasks_s`` at most. Without word, or with tasks that live on, the jobs stay claimed until they are stale. The
        lease goes back at once. Should the query be started again meanwhile, our token is old and nothing is released.
        """
        self._stop.set()
        with self._lock:
            tokens, left = dict(self._tokens), set(self._in_flight)
        # A link of its own: whatever held the other one may have been interrupted. And quick: this process is ending.
        link = Link(replace(_quick(self._connection, 2000), connect_timeout_ms=1000))
        for queue, token in tokens.items():
            self._try(partial(link.run, self._place(queue).keep(token, 0, linger_ms=int(linger_s * 1000))))
        released = 0
        told_by = time.monotonic() + grace_s
        stopped: dict[tuple[str, int], float] = {}
        while left:
            for queue, seq in sorted(left):
                found = self._try(partial(self._give_back, link, queue, seq, stopped, linger_s))
                if found is not None:
                    left.discard((queue, seq))
                    released += found
            if not left or time.monotonic() > (max(stopped.values()) + tasks_s if stopped else told_by):
                break
            time.sleep(_POLL_S)
        if left:
            log.info("jobs of %d batches stay claimed until they are stale: they may still be run", len(left))
        for queue in tokens:
            self._try(partial(link.run, self._place(queue).member.leave()))
        link.close()
        return released

    def _give_back(
        self, link: Link, queue: str, seq: int, stopped: dict[tuple[str, int], float], linger_s: float
    ) -> int | None:
        """How many jobs of the batch were given back; None: too early to say."""
        place, token, now = self._place(queue), self._tokens.get(queue, 0), time.monotonic()
        if (queue, seq) in self._planned:
            batch = link.run(place.progress(seq, token))
            how = link.run(manifests.how_ended(batch.run)) if batch.run else ""
            if not batch.there or how == FAILED:
                return 0
            if batch.run and how != STOPPED:
                return None
            # One that no task has begun is marked as given back before one can.
            if batch.run and now < stopped.setdefault((queue, seq), now) + linger_s:
                return None
            if batch.tasks and batch.silent_ms < _SILENT_MS:
                return None
        return with_group(link, place, partial(self._release, place, seq, token)) or 0

    def _release(self, place: Place, seq: int, token: int) -> Flow[int | None]:
        blocks = yield from place.blocks(seq)
        min_idle_ms = self._terms.claim_min_idle_ms
        return (yield from place.release(seq, token, blocks, min_idle_ms=min_idle_ms, state=_RELEASED))

    def _try(self, call: Callable[[], T]) -> T | None:
        """One queue that makes trouble must not keep the jobs of the others."""
        try:
            return call()
        except ChasquiError as error:
            log.debug("leaving: %s", error.message)
            return None

    def close(self) -> None:
        """Stop renewing and give the lease back; the claims stay, for the driver that comes next."""
        self._stop.set()
        with self._lock:
            tokens, self._tokens = self._tokens, {}
        for queue, token in tokens.items():
            try:
                self._link.run(self._place(queue).keep(token, 0))
            except ChasquiError as error:
                log.info("queue %r: the lease was not given back (%s); it lapses", queue, error.message)
        self._link.close()
        self._heart_link.close()

    # Staying alive.

    def _beat(self) -> None:
        every_s = min(self._ttl_ms, self._terms.claim_min_idle_ms) / 3000
        while not self._stop.wait(every_s):
            with self._lock:
                tokens, flying = dict(self._tokens), dict(self._in_flight)
            for queue, token in tokens.items():
                try:
                    self._renew(queue, token, {seq: at for (name, seq), at in sorted(flying.items()) if name == queue})
                except ChasquiError as error:
                    log.warning("queue %r: renewing claims: %s; trying again", queue, error.message)
                except Exception:
                    log.exception("queue %r: renewing claims; trying again", queue)

    def _renew(self, queue: str, token: int, flying: dict[int, float]) -> None:
        place, link = self._place(queue), self._heart_link
        if not link.run(place.keep(token, self._ttl_ms, list(flying))):
            log.warning("queue %r: another driver has taken the lease", queue)
            return  # the next script that wants the token says so to Spark
        # This comes three times per threshold at least: a batch that is fresh now is renewed long before it is stale.
        now = time.monotonic()
        for seq in [seq for seq, at in flying.items() if now - at >= self._terms.claim_min_idle_ms / 6000]:
            lost = 0
            for items in _blocks(link, place, seq):
                if self._stop.is_set():
                    return
                ids = [entry_id for entry_id, _ in items]
                lost += len(with_group(link, place, partial(place.member.renew, ids)))
            with self._lock:
                if (queue, seq) in self._in_flight:
                    self._in_flight[queue, seq] = now
                if lost:
                    self._mine.discard((queue, seq))
        if now >= self._next_forget.get(queue, 0.0):
            self._next_forget[queue] = now + _FORGET_EVERY_S
            gone = with_group(link, place, partial(place.member.forget, FORGET_IDLE_MS))
            if gone:
                log.info("queue %r: forgot %d workers that were idle for a day", queue, len(gone))


def _group_in(terms: str | None) -> str | None:
    """The group that a session has; None where it does not tell."""
    try:
        return None if terms is None else SettleTerms.parse(terms).group
    except DecodeError:
        return None


def with_group(link: Link, place: Place, make: Callable[[], Flow[T]]) -> T:
    """Run a flow that needs the group. Stream or group may have been deleted while jobs were in hand: then they are
    made again, and so is the flow, which finds none of those jobs.
    """
    try:
        return link.run(make())
    except ServerError as error:
        if "NOGROUP" not in error.message:
            raise
    log.warning("stream or group of queue %r is gone: made again", place.keys.queue)
    link.run(place.member.ensure_group())
    return link.run(make())


def _blocks(link: Link, place: Place, seq: int) -> Iterator[list[Item]]:
    for block in range(1, link.run(place.blocks(seq)) + 1):
        items = link.run(place.items(seq, [block]))[0]
        if items:
            yield items


def _quick(connection: ConnectionOptions, within_ms: int) -> ConnectionOptions:
    """One try that is over soon, for who tries again by itself."""
    most = max(1000, within_ms)
    return replace(
        connection,
        reconnect_attempts=0,
        connect_timeout_ms=min(most, connection.connect_timeout_ms),
        socket_timeout_ms=min(most, connection.socket_timeout_ms),
    )


def settle(link: Link, queue: str, sid: str, seq: int, terms: SettleTerms | None = None) -> int:
    """Settle a batch that Spark has committed, from any process that knows of the commit; how many jobs were left in
    it.

    Killed half way: done blocks are gone, the others are found by the next who settles. Twice at a time: each block is
    settled once. Without ``terms`` they are read from the session.
    """
    keys = Keys(queue)
    if terms is None:
        text = link.run(Place(keys, "", sid).terms())
        if text is None:
            return 0
        terms = SettleTerms.parse(text)
    place = Place(keys, terms.group, sid)
    blocks = list(range(1, link.run(place.blocks(seq)) + 1))
    if terms.ack == "commit":
        return with_group(link, place, partial(place.settle, seq, blocks)) if blocks else 0
    if terms.leftover != "retry":
        how = "ack" if terms.leftover == "ok" else "release"
        left = with_group(link, place, partial(place.settle, seq, blocks, how, terms.claim_min_idle_ms))
    else:
        left = _retry_leftovers(link, place, seq, blocks, terms)
    if left:
        log.warning("queue %r: %d jobs of batch %d had no outcome; leftover=%s", queue, left, seq, terms.leftover)
    return left


def _retry_leftovers(link: Link, place: Place, seq: int, blocks: Sequence[int], terms: SettleTerms) -> int:
    """A block goes only after its leftovers have: killed in between, the next who settles finds them there."""
    left = 0
    for ids in with_group(link, place, partial(place.unsettled, seq, blocks)):
        if ids:
            told = [Outcome(entry_id, RETRY, error="unsettled") for entry_id in ids]
            gone = Outcomes(link, place.keys.queue, terms, place.member.consumer).settle(told).gone
            left += len(ids) - gone
    link.run(place.settle(seq, blocks, "drop"))
    return left


def tell_ended(link: Link, run: str, *, failed: bool) -> None:
    """Tell the driver's process of a Spark run that it has ended, and that every commit of it has been heard of."""
    link.run(manifests.tell_ended(run, FAILED if failed else STOPPED))
