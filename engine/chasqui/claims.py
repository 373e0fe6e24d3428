"""A Spark driver's hold on jobs: it leases a checkpoint's place, takes jobs into manifests, keeps the claims alive
while Spark runs the batch, and settles what Spark has committed. Blocking; a thread of its own renews.

Killed at any point: what is in a manifest is found again by the driver that comes next; what is in none has not been
taken. Server gone: calls try for as long as the connection options say, then the query fails and is started again by
whoever looks after it; the thread goes on by itself.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from chasqui.errors import ChasquiError, CheckpointInUse, DecodeError, ServerError
from chasqui.options import ConnectionOptions, Settling, build, check, option
from chasqui.outcomes import RETRY, Outcome, Outcomes
from chasqui.protocol import manifests
from chasqui.protocol.codec import decode_envelope
from chasqui.protocol.consume import DeadLetter
from chasqui.protocol.flow import Flow
from chasqui.protocol.keys import Keys
from chasqui.protocol.manifests import Item, Place
from chasqui.protocol.replies import fields
from chasqui.protocol.scripts import SCRIPT_ENTRIES
from chasqui.redis_io import Link

log = logging.getLogger("chasqui.claims")

STOPPED, FAILED = "stopped", "failed"
_RELEASED, _DISSOLVED = "released", "dissolved"
_POLL_S = 0.05
_SLICES_AT_ONCE = 4
_UNKNOWN = float("-inf")


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
    """A batch to be run: how many jobs each of its blocks holds, from block 1, and how many were struck out."""

    sizes: tuple[int, ...] = ()
    dropped: int = 0


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
        self._holder = uuid.uuid4().hex
        self._lock = threading.RLock()  # a signal handler may come in between
        self._tokens: dict[str, int] = {}
        self._in_flight: dict[tuple[str, int], float] = {}  # and when its claims were last known to be fresh
        self._mine: set[tuple[str, int]] = set()  # taken by this process: as fresh as it gets
        self._planned: set[tuple[str, int]] = set()
        self._looked: dict[str, int] = {}
        self._next_stale: dict[str, float] = {}
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
        if self._heart is None:
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

    def newest(self, queue: str) -> str:
        """The id of the newest entry of the stream."""
        self.hold(queue)
        return self._link.run(self._place(queue).newest())

    def claim(self, queue: str, seq: int, *, limit: int, max_bytes: int | None = None, upto: str = "") -> int:
        """Take up to ``limit`` jobs into manifest ``seq`` and close it; how many it holds.

        One that is there already, because a driver died between this and Spark's log, is closed as it is.
        """
        place, token = self._place(queue), self._token(queue)
        if self._looked.get(queue) != seq:
            self._looked[queue] = seq
            if self._link.run(place.exists(seq)) and (found := self._seal(queue, seq)):
                return found
        try:
            jobs = self._fill(place, seq, token, limit, max_bytes, upto)
        except ServerError as error:
            if "NOGROUP" not in error.message:
                raise
            log.warning("stream or group of queue %r is gone: made again", queue)
            self._link.run(place.member.ensure_group())
            return 0
        if jobs is None:
            self._fenced(queue)
            return 0
        return self._seal(queue, seq) if jobs else 0

    def _fill(self, place: Place, seq: int, token: int, limit: int, max_bytes: int | None, upto: str) -> int | None:
        queue, min_idle_ms = place.keys.queue, self._terms.claim_min_idle_ms
        jobs, began = 0, time.monotonic()
        # A limit in bytes is looked at after each slice.
        slices = min(_SLICES_AT_ONCE, -(-limit // SCRIPT_ENTRIES)) if max_bytes is None else 1
        for idle_ms in [min_idle_ms, 0] if time.monotonic() >= self._next_stale.get(queue, 0.0) else [0]:
            while True:
                taken = self._link.run(place.claim(seq, token, limit, min_idle_ms=idle_ms, upto=upto, slices=slices))
                if taken is None:
                    return None
                if taken.jobs and not jobs:
                    with self._lock:
                        self._in_flight[queue, seq] = began
                        self._mine.add((queue, seq))
                jobs = taken.jobs
                if max_bytes is not None and taken.size >= max_bytes:
                    return jobs
                if not taken.now or jobs >= limit:
                    break
            if idle_ms and not taken.now:
                # Nothing stale is left. While there is, the next batch looks again at once.
                self._next_stale[queue] = time.monotonic() + min_idle_ms / 3000
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
        plan = self._link.run(place.plan(seq, token, self._holder))
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
        if plan.new and (queue, seq) not in self._mine:
            found = self._link.run(place.revalidate(seq, token, plan.blocks, self._terms.claim_min_idle_ms))
            if found is None:
                self._fenced(queue)
                return self.plan(queue, seq)
            dropped = found
            if dropped:
                log.warning("queue %r: %d jobs of batch %d are settled or with others by now", queue, dropped, seq)
        if plan.runs > self._max_runs:
            self._dissolve(place, seq, token, replace(plan, jobs=plan.jobs - dropped))
            return Planned(dropped=dropped)
        return Planned(tuple(self._link.run(place.sizes(seq, plan.blocks))), dropped)

    def _dissolve(self, place: Place, seq: int, token: int, plan: manifests.Plan) -> None:
        """A batch that never comes to its end holds a job that kills its process. Which one shows in smaller batches;
        one alone in its batch is it.
        """
        queue, runs = place.keys.queue, plan.runs - 1
        if plan.jobs > 1:
            log.warning("queue %r: batch %d was run %d times in vain: its %d jobs go on in batches of a tenth",
                        queue, seq, runs, plan.jobs)  # fmt: skip
            self._link.run(
                place.release(
                    *(seq, token, plan.blocks),
                    min_idle_ms=self._terms.claim_min_idle_ms,
                    state=_DISSOLVED,
                    narrow=max(1, plan.jobs // 10),
                )
            )
            with self._lock:
                self._in_flight.pop((queue, seq), None)
            self._next_stale.pop(queue, None)
            return
        log.warning("queue %r: the only job of batch %d ended its process %d times: given up", queue, seq, runs)
        blocks = [items for _, items in self._blocks(place, seq) if items]
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

    def _blocks(self, place: Place, seq: int) -> Iterator[tuple[int, list[Item]]]:
        for block in range(1, self._link.run(place.blocks(seq)) + 1):
            yield block, self._link.run(place.items(seq, [block]))[0]

    # Ending.

    def settle(self, queue: str, seq: int) -> None:
        """Spark has committed this batch."""
        settle(self._link, queue, self.sid, seq, self._terms)
        with self._lock:
            self._in_flight.pop((queue, seq), None)
            for known in (self._mine, self._planned):
                known.discard((queue, seq))

    def leave(self, grace_s: float) -> int:
        """The query was stopped: give back what it had taken and not committed; how many jobs that was.

        Whether Spark committed the last batch only the listener knows, which hears of every commit before it hears of
        the end. So this waits for its word, for ``grace_s`` at most; without it the jobs stay claimed until they are
        stale. The lease goes back at once. Should the query be started again meanwhile, our token is old and nothing is
        released.
        """
        self._stop.set()
        with self._lock:
            tokens, left = dict(self._tokens), set(self._in_flight)
        # A link of its own: whatever held the other one may have been interrupted. And quick: this process is ending.
        link = Link(replace(self._connection, reconnect_attempts=0, connect_timeout_ms=1000, socket_timeout_ms=2000))
        for queue, token in tokens.items():
            link.run(self._place(queue).keep(token, 0))
        released = 0
        deadline = time.monotonic() + grace_s
        while left:
            for queue, seq in sorted(left):
                place = self._place(queue)
                how = STOPPED
                if (queue, seq) in self._planned:
                    if not link.run(place.exists(seq)):
                        left.discard((queue, seq))
                        continue
                    run = link.run(place.run_of(seq))
                    how = link.run(manifests.how_ended(run)) if run else ""
                if how:
                    left.discard((queue, seq))
                if how == STOPPED:
                    released += link.run(self._release(place, seq, tokens.get(queue, 0))) or 0
            if not left or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        link.close()
        return released

    def _release(self, place: Place, seq: int, token: int) -> Flow[int | None]:
        blocks = yield from place.blocks(seq)
        min_idle_ms = self._terms.claim_min_idle_ms
        return (yield from place.release(seq, token, blocks, min_idle_ms=min_idle_ms, state=_RELEASED))

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

    def _renew(self, queue: str, token: int, flying: dict[int, float]) -> None:
        place = self._place(queue)
        if not self._link.run(place.keep(token, self._ttl_ms, list(flying))):
            log.warning("queue %r: another driver has taken the lease", queue)
            return  # the next script that wants the token says so to Spark
        # This comes three times per threshold at least: a batch that is fresh now is renewed long before it is stale.
        now = time.monotonic()
        for seq in [seq for seq, at in flying.items() if now - at >= self._terms.claim_min_idle_ms / 6000]:
            for _, items in self._blocks(place, seq):
                if self._stop.is_set():
                    return
                if items:
                    self._link.run(place.member.renew([entry_id for entry_id, _ in items]))
            with self._lock:
                if (queue, seq) in self._in_flight:
                    self._in_flight[queue, seq] = now


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
        return link.run(place.settle(seq, blocks)) if blocks else 0
    if terms.leftover != "retry":
        how = "ack" if terms.leftover == "ok" else "release"
        left = link.run(place.settle(seq, blocks, how, terms.claim_min_idle_ms))
    else:
        left = _retry_leftovers(link, place, seq, blocks, terms)
    if left:
        log.warning("queue %r: %d jobs of batch %d had no outcome; leftover=%s", queue, left, seq, terms.leftover)
    return left


def _retry_leftovers(link: Link, place: Place, seq: int, blocks: Sequence[int], terms: SettleTerms) -> int:
    """A block goes only after its leftovers have: killed in between, the next who settles finds them there."""
    left = 0
    for ids in link.run(place.unsettled(seq, blocks)):
        if ids:
            told = [Outcome(entry_id, RETRY, error="unsettled") for entry_id in ids]
            gone = Outcomes(link, place.keys.queue, terms).settle(told).gone
            left += len(ids) - gone
    link.run(place.settle(seq, blocks, "drop"))
    return left


def tell_ended(link: Link, run: str, *, failed: bool) -> None:
    """Tell the driver's process of a Spark run that it has ended, and that every commit of it has been heard of."""
    link.run(manifests.tell_ended(run, FAILED if failed else STOPPED))
