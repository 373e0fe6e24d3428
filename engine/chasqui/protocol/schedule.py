"""Repeatable jobs: store, list, remove; and one pass of the scheduler: due specs -> stream.

A pass reads what is due, plans it here, and has each plan carried out by one script call that is gated on the spec
being as it was planned from. So planning may be slow, interrupted or done by two at a time: what counts is decided in
the server, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chasqui.errors import ConfigError, DecodeError, NoFutureFire
from chasqui.protocol.codec import Envelope, encode_envelope
from chasqui.protocol.flow import Arg, Batch, Flow, Refusal, call_script, call_scripts, command
from chasqui.protocol.keys import Keys
from chasqui.protocol.lease import Lease
from chasqui.protocol.produce import RESEND_MS, Room
from chasqui.protocol.replies import number, plain, score_ms
from chasqui.protocol.scripts import SCRIPT_BYTES, SCRIPT_ENTRIES, Script, script
from chasqui.protocol.specs import StoredSpec, decode_spec, encode_spec
from chasqui.repeat import RepeatableMeta

MAX_KEY_BYTES = 2048
# An interval so short that the outage holds more windows than this is set to this long after now, as ChasquiMQ does.
MAX_STEPS = 100_000
REARM_MS = 60_000
# Most jobs of one pass. The lease is renewed between passes, so a pass has to be short beside it.
PASS_JOBS = 10 * SCRIPT_ENTRIES
_LEASE_LOST = -2
_DETAIL_CHARS = 1000
_ENVELOPE_EXTRA = 256
_LIST_PAGE = 250
_HASH_FIELDS = ("spec", "dst", "catchup")


# --- Store, list, remove ---


def checked_key(key: Any) -> str:
    """A spec's key: text that is not blank and not too long."""
    data = _utf8(key)
    if len(data) > MAX_KEY_BYTES:
        raise ConfigError(f"key takes at most {MAX_KEY_BYTES} bytes of UTF-8, got {len(data)}: give a shorter one")
    if not data.strip():
        raise ConfigError(f"key expects text that is not blank, got {key!r}; leave it out to have one made")
    return str(key)


def upsert(keys: Keys, spec: StoredSpec, first_ms: int, now_ms: int) -> Flow[None]:
    """Store a spec, to fire first at that time.

    With that far away no scheduler can have acted on it before it is sent again; nearer, sending it again might set
    back what has been fired already.
    """
    yield from call_script(
        script("upsert_repeat"),
        [keys.repeat, keys.repeat_spec(spec.key)],
        [first_ms, spec.key, encode_spec(spec), _dst(spec)],
        safe=first_ms - now_ms >= RESEND_MS,
    )


def listed(keys: Keys, limit: int) -> Flow[list[RepeatableMeta]]:
    """The specs that fire next; those that cannot be read are left out."""
    flat = yield command("ZRANGE", keys.repeat, 0, limit - 1, "WITHSCORES", safe=True)
    found: list[RepeatableMeta] = []
    pairs = _pairs(flat)
    for start in range(0, len(pairs), _LIST_PAGE):
        page = pairs[start : start + _LIST_PAGE]
        stored = yield from _read(keys, page)
        for (member, score), fields in zip(page, stored, strict=True):
            try:
                found.append(_meta(_decoded(fields), plain(member), score_ms(score)))
            except DecodeError:
                continue
    return found


def remove(keys: Keys, key: Any) -> Flow[bool]:
    """Remove a spec; False when there is none.

    Not sent again after a lost reply: the second answer would be False for a spec that the first call removed.
    """
    _utf8(key)
    reply = yield from call_script(script("remove_repeat"), [keys.repeat, keys.repeat_spec(key)], [key])
    return number(reply) == 1


def _utf8(key: Any) -> bytes:
    if not isinstance(key, str):
        raise ConfigError(f"key expects text, got {type(key).__name__}")
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"key holds characters that UTF-8 cannot write (a lone surrogate): {key!r:.80}") from None


def _dst(spec: StoredSpec) -> str:
    """The policies for clock changes, where the pattern has others than the usual ones."""
    pattern = spec.pattern
    usual = pattern.expression is None or (pattern.gap, pattern.overlap) == ("shift", "first")
    return "" if usual else f"{pattern.gap},{pattern.overlap}"


def _meta(spec: StoredSpec, key: str, next_ms: int) -> RepeatableMeta:
    return RepeatableMeta(
        key=key,
        job_name=spec.job_name,
        pattern=spec.pattern,
        next_fire_ms=next_ms,
        limit=spec.limit,
        start_after_ms=spec.start_after_ms,
        end_before_ms=spec.end_before_ms,
        missed_fires=spec.missed_fires,
        retry=spec.retry,
    )


# --- Planning ---


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a due spec: the windows that fire now, and when it is due again (0: never, it is removed).

    ``left``: the catch-up was cut to the size of one call, goes on at ``next_ms``, and has so many fires left.
    """

    fires: list[int]
    next_ms: int
    left: int = 0


def plan_fires(
    spec: StoredSpec, fire_at: int, now_ms: int, *, left: int | None = None, most: int = SCRIPT_ENTRIES
) -> Plan:
    """Plan a spec that was due at ``fire_at``, with at most ``most`` fires.

    While the window after it is still to come, the one at hand fires, however late it is, also when it is the last of
    all. When more were missed, the spec's policy decides. ``left`` is what an earlier call of the same catch-up left.
    """
    following = _next(spec, fire_at)
    if following is None or following >= now_ms:
        return _ended(spec, Plan([fire_at], following or 0))
    policy = spec.missed_fires
    if policy.kind == "fire_all":
        return _ended(spec, _catch_up(spec, fire_at, now_ms, left or policy.max_catchup or 1, most))
    fires = [fire_at] if policy.kind == "fire_once" else []
    return _ended(spec, Plan(fires, _first_after(spec, fire_at, now_ms)))


def _catch_up(spec: StoredSpec, fire_at: int, now_ms: int, allowed: int, most: int) -> Plan:
    fires: list[int] = []
    end = min(now_ms, spec.end_before_ms or now_ms)
    cursor: int | None = fire_at
    while cursor is not None and cursor <= end and len(fires) < min(allowed, most):
        fires.append(cursor)
        cursor = _next(spec, cursor)
    left = allowed - len(fires)
    if cursor is None:
        return Plan(fires, 0)
    if cursor > end:
        return Plan(fires, cursor)
    return Plan(fires, cursor, left) if left else Plan(fires, _first_after(spec, cursor, now_ms))


def _ended(spec: StoredSpec, plan: Plan) -> Plan:
    beyond = spec.end_before_ms and plan.next_ms > spec.end_before_ms
    return Plan(plan.fires, 0) if beyond else plan


def _next(spec: StoredSpec, after_ms: int) -> int | None:
    try:
        return spec.pattern.next_fire_ms(max(after_ms, spec.start_after_ms or 0))
    except NoFutureFire:
        return None


def _first_after(spec: StoredSpec, cursor: int, now_ms: int) -> int:
    """The first window after now, in the rhythm of ``cursor``; 0 when there is none.

    Not walked window by window: a second's rhythm and a day's outage would be two seconds of standing still, in which
    the lease runs out.
    """
    interval = spec.pattern.interval_ms
    if interval is not None:
        start = max(cursor, spec.start_after_ms or 0)
        steps = (now_ms - start) // interval + 1
        return start + steps * interval if steps <= MAX_STEPS else now_ms + REARM_MS
    # The last moment up to now that has the milliseconds of the rhythm: cron keeps them.
    near: int | None = now_ms - (now_ms - cursor) % 1000
    while near is not None and near <= now_ms:
        near = _next(spec, near)
    return near or 0


# --- One pass ---


def pass_once(
    keys: Keys, lease: Lease, room: Room, batch: int, dlq_len: int, new_ids: Callable[[int, int], Sequence[str]]
) -> Flow[bool | None]:
    """Fire what is due, up to ``batch`` specs. None when another leads, True when there is more to do at once.

    Every script call may be sent again after a lost reply, because what it did is what it looks for first. Killed
    between two calls, the specs that were not reached are still due, and whoever leads next finds them.
    """
    if not (yield from lease.take()):
        return None
    reply = yield from call_script(script("due_repeats"), [keys.repeat], [batch], safe=True)
    due = _pairs(reply[1])
    stored = yield from _read(keys, due)
    work = _Pass(keys, lease, room, number(reply[0]), dlq_len, new_ids)
    more, acted = len(due) == batch, False
    refused: Refusal | None = None
    calls: list[_Call] = []
    size = jobs = 0
    for i, ((member, score), fields) in enumerate(zip(due, stored, strict=True)):
        planned = work.plan(member, score, fields)
        calls.append(planned.call)
        size += planned.size
        jobs += planned.jobs
        more |= planned.goes_on
        if size < SCRIPT_BYTES and jobs < PASS_JOBS and i + 1 < len(due):
            continue
        for answer in (yield from call_scripts(calls, safe=True)):
            if isinstance(answer, Refusal):
                refused = refused or answer
            elif isinstance(answer, list) or number(answer) == 1:
                acted = True
            elif number(answer) == _LEASE_LOST:
                return None
        calls, size = [], 0
        if jobs >= PASS_JOBS:
            more = True
            break
    if refused is not None:
        raise refused
    # Specs that are held at the cap stay due: without this, a full batch of them would be tried without a rest.
    return more and acted


_Call = tuple[Script, list[str], list[Arg]]


@dataclass(frozen=True, slots=True)
class _Planned:
    call: _Call
    size: int
    jobs: int = 0
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the calls of one pass have in common."""

    keys: Keys
    lease: Lease
    room: Room
    now_ms: int
    dlq_len: int
    new_ids: Callable[[int, int], Sequence[str]]

    def plan(self, member: bytes, score: bytes, fields: Any) -> _Planned:
        """The script call for one due spec, whatever lies there in its place."""
        try:
            key = member.decode()
        except UnicodeDecodeError:
            # Whatever hash belongs to it cannot be named here; the set's own key stands in, and is left alone.
            return self._set_aside(member, score, self.keys.repeat, b"", "the key is not UTF-8")
        try:
            spec = _decoded(fields)
            spec.pattern.check()
        except (DecodeError, ConfigError) as error:
            return self._set_aside(member, score, self.keys.repeat_spec(key), _blob(fields), error.message)
        return self._fire(key, score, spec, fields)

    def _fire(self, key: str, score: bytes, spec: StoredSpec, fields: list[bytes]) -> _Planned:
        fire_at = score_ms(score)
        each = len(spec.element) + _ENVELOPE_EXTRA
        most = max(1, min(SCRIPT_ENTRIES, SCRIPT_BYTES // each))
        plan = plan_fires(spec, fire_at, self.now_ms, left=_left(fields[2], fire_at), most=most)
        envelopes = [
            # The stored element is the payload's place in the envelope, byte for byte, bin or not.
            encode_envelope(Envelope(job_id, spec.element, self.now_ms, 0, spec.retry, inline=True))
            for job_id in self.new_ids(len(plan.fires), self.now_ms)
        ]
        args: list[Arg] = [self.lease.holder, key, score, _sha(fields[0]), self.room.cap, self.room.trim]
        args += [spec.limit or 0, plan.next_ms, f"{plan.next_ms},{plan.left}" if plan.left else "", spec.job_name]
        names = [self.lease.key, self.keys.repeat, self.keys.repeat_spec(key), self.keys.stream]
        call = (script("fire_repeat"), names, [*args, *envelopes])
        return _Planned(call, each * len(envelopes), len(envelopes), goes_on=plan.left > 0)

    def _set_aside(self, member: bytes, score: bytes, spec_key: str, blob: bytes, why: str) -> _Planned:
        detail = f"repeat spec {plain(member)}: {why}"[:_DETAIL_CHARS]
        names = [self.lease.key, self.keys.repeat, spec_key, self.keys.dlq]
        args: list[Arg] = [self.lease.holder, member, score, _sha(blob), self.dlq_len, detail]
        return _Planned((script("set_aside_repeat"), names, args), len(detail))


def _read(keys: Keys, pairs: list[tuple[bytes, bytes]]) -> Flow[list[Any]]:
    """The fields of each spec; a refusal in place of those whose key is no hash. Any other refusal tells nothing about
    the spec, and must not be taken for one that is broken.
    """
    names = [keys.repeat_spec(plain(member)) for member, _ in pairs]
    replies: list[Any] = yield Batch(tuple(command("HMGET", name, *_HASH_FIELDS, safe=True) for name in names))
    for reply in replies:
        if isinstance(reply, Refusal) and reply.code != "WRONGTYPE":
            raise reply
    return replies


def _decoded(fields: Any) -> StoredSpec:
    """The spec in the reply of ``_read``."""
    if isinstance(fields, Refusal):
        raise DecodeError(f"{fields.code} {fields.text}")
    blob, dst, _ = fields
    if blob is None:
        raise DecodeError("it is due, but its bytes are missing")
    if dst is None:
        return decode_spec(blob)
    gap, comma, overlap = plain(dst).partition(",")
    if not comma:
        raise DecodeError(f"dst expects gap,overlap, found {plain(dst)!r:.40}")
    return decode_spec(blob, gap=gap, overlap=overlap)


def _blob(fields: Any) -> bytes:
    return b"" if isinstance(fields, Refusal) or fields[0] is None else bytes(fields[0])


def _left(catchup: bytes | None, fire_at: int) -> int | None:
    """What a catch-up has left, if it was cut at that very fire; a record of another moment is out of date."""
    at, _, left = plain(catchup).partition(",")
    return int(left) if at == str(fire_at) and left.isdecimal() else None


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    return [(flat[i], flat[i + 1]) for i in range(0, len(flat) - 1, 2)]


def _sha(blob: bytes) -> str:
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest()
