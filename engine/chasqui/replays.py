"""Dead letters back to their queues one by one, repaired on the way, at a chosen pace: for triage from outside.

Each leaves the dead letters and enters the stream in one step, so a second try, after a lost reply or by a task that is
run again, finds it gone and does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chasqui.errors import ConfigError, DecodeError, PayloadError, QueueFull
from chasqui.outcomes import slices
from chasqui.payload import too_large
from chasqui.protocol.codec import decode_envelope, encode_envelope
from chasqui.protocol.flow import Arg, Batch, Flow, call_script, command, values
from chasqui.protocol.keys import Keys, name_bytes
from chasqui.protocol.replies import fields, number
from chasqui.protocol.scripts import script
from chasqui.redis_io import Link

_LOOK_AT_ONCE = 250
_FULL_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Repaired:
    """A dead letter to be put back. What is None stays as it was; ``payload`` is MessagePack."""

    entry_id: str
    payload: bytes | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """At most so many a second, counted on the server under ``key_id``, so that all who share it share the pace."""

    per_second: int
    key_id: str


class Replays:
    """Puts dead letters of one queue back. Threads may share it."""

    def __init__(
        self,
        link: Link,
        queue: str,
        *,
        max_stream_len: int = 1_000_000,
        wait_for_room_ms: int = 0,
        max_payload_bytes: int = 1_048_576,
        pace: Pace | None = None,
    ) -> None:
        self._link, self._keys, self._pace = link, Keys(queue), pace
        self._cap, self._wait_ms, self._most_bytes = max_stream_len, wait_for_room_ms, max_payload_bytes

    def put_back(self, letters: Sequence[Repaired]) -> int:
        """Put them back with attempt 0; how many were still there. ``ConfigError`` names one that cannot be a job."""
        step = _LOOK_AT_ONCE if self._pace is None else max(1, min(_LOOK_AT_ONCE, self._pace.per_second // 10))
        moved = 0
        for start in range(0, len(letters), step):
            part = letters[start : start + step]
            ready = [found for found in self._look(part) if found is not None]
            for some in slices(ready, lambda one: len(one[1])):
                self._wait_for_turn(len(some))
                moved += self._move(some)
        return moved

    def _look(self, letters: Sequence[Repaired]) -> list[tuple[str, bytes, bytes] | None]:
        """Entry id, envelope and name of each; None for those that are gone."""
        replies = self._link.run(_records(self._keys, [letter.entry_id for letter in letters]))
        return [
            None if flat is None else (letter.entry_id, *self._mended(letter, flat))
            for letter, flat in zip(letters, replies, strict=True)
        ]

    def _mended(self, letter: Repaired, flat: dict[bytes, bytes]) -> tuple[bytes, bytes]:
        try:
            envelope = decode_envelope(flat.get(b"d", b"")).with_attempt(0)
        except DecodeError as error:
            raise ConfigError(
                f"dead letter {letter.entry_id} of queue {self._keys.queue!r} is no job ({error.message}): its payload "
                f"can be repaired, its envelope not; leave it out, or add a new job in its place"
            ) from None
        if letter.payload is not None:
            envelope = replace(envelope, payload=letter.payload, inline=False)
        data = encode_envelope(envelope)
        if len(data) > self._most_bytes:
            too_much = too_large(len(data), self._most_bytes)
            raise PayloadError(f"dead letter {letter.entry_id} of queue {self._keys.queue!r}: {too_much.message}")
        return data, flat.get(b"n", b"") if letter.name is None else name_bytes(letter.name)

    def _wait_for_turn(self, count: int) -> None:
        if self._pace is not None:
            key = self._keys.replay_pace(self._pace.key_id)
            reply = self._link.run(call_script(script("take_turn"), [key], [self._pace.per_second, count], safe=True))
            time.sleep(number(reply) / 1000)

    def _move(self, ready: Sequence[tuple[str, bytes, bytes]]) -> int:
        """One call, again while the stream is full: what was moved by then is no longer there to be moved twice."""
        args: list[Arg] = [self._cap, 0]
        for entry_id, data, name in ready:
            args += [entry_id, data, name]
        deadline = time.monotonic() + self._wait_ms / 1000
        moved = 0
        while True:
            keys = [self._keys.dlq, self._keys.stream]
            reply = self._link.run(call_script(script("replay_dead_letters"), keys, args, safe=True))
            moved += number(reply[0])
            if not number(reply[1]):
                return moved
            if time.monotonic() >= deadline:
                raise QueueFull(
                    f"queue {self._keys.queue!r} is full ({self._cap} jobs): the other dead letters stay where they "
                    f"are; let workers drain it, or raise maxStreamLen"
                )
            time.sleep(_FULL_EVERY_S)


def _records(keys: Keys, ids: Sequence[str]) -> Flow[list[dict[bytes, bytes] | None]]:
    replies = values((yield Batch(tuple(command("XRANGE", keys.dlq, i, i, safe=True) for i in ids))))
    return [fields(reply[0][1]) if reply else None for reply in replies]
