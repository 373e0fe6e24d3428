"""Taking jobs and settling them. Each transition is one script, gated so that it happens once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from chasqui.protocol.flow import Arg, Command, Flow, Refusal, call_script
from chasqui.protocol.keys import Keys
from chasqui.protocol.replies import fields, number, plain
from chasqui.protocol.scripts import SCRIPT_ENTRIES, Script, script

FORGET_IDLE_MS = 24 * 3600 * 1000
"""Names of workers that were idle for so long, and hold nothing, are forgotten."""

Entry = tuple[bytes, Any, int]
"""A stream entry as it was delivered: id, flat list of fields and values, deliveries before this one."""

Call = tuple[Script, list[str], list[Arg]]
"""A script with its keys and arguments, to be sent together with others."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's place: the queue's keys, the group, and its name in it."""

    keys: Keys
    group: str
    consumer: str

    def ensure_group(self) -> Flow[None]:
        """Make stream and group where they are missing; a new group sees what is there already."""
        try:
            yield Command(("XGROUP", "CREATE", self.keys.stream, self.group, "0", "MKSTREAM"), safe=True)
        except Refusal as refusal:
            if refusal.code != "BUSYGROUP":
                raise

    def read(self, count: int, block_ms: int) -> Flow[list[Entry]]:
        """New entries; waits up to ``block_ms`` for some.

        Not sent again after a lost reply: what it took is ours, unseen, and comes back as stale.
        """
        reply = yield Command(
            (
                *("XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", count, "BLOCK", block_ms),
                *("STREAMS", self.keys.stream, ">"),
            ),
            wait_ms=block_ms,
        )
        return [(entry[0], entry[1], 0) for entry in reply[0][1]] if reply else []

    def claim_stale(self, min_idle_ms: int, count: int, start: int) -> Flow[tuple[list[Entry], int, int]]:
        """Entries of workers that fell silent; when to look again (-1: any time), and with which ``start``."""
        reply = yield from call_script(
            script("claim_stale"),
            [self.keys.stream],
            [self.group, self.consumer, min_idle_ms, min(count, SCRIPT_ENTRIES), start],
        )
        entries = [(entry[0], entry[1], number(entry[2])) for entry in reply[0]]
        return entries, number(reply[1]), number(reply[2])

    def renew(self, ids: Sequence[bytes]) -> Flow[list[bytes]]:
        """Renew our claims; returns those that we have lost."""
        lost: list[bytes] = []
        for start in range(0, len(ids), SCRIPT_ENTRIES):
            chunk = ids[start : start + SCRIPT_ENTRIES]
            lost += yield from call_script(
                script("renew_claims"), [self.keys.stream], [self.group, self.consumer, *chunk], safe=True
            )
        return lost

    def release(self, min_idle_ms: int, entries: Sequence[tuple[bytes, int]]) -> Flow[int]:
        """Give entries back unstarted: id and deliveries before ours."""
        released = 0
        for start in range(0, len(entries), SCRIPT_ENTRIES):
            args: list[Arg] = [self.group, self.consumer, min_idle_ms]
            for entry_id, deliveries in entries[start : start + SCRIPT_ENTRIES]:
                args += [entry_id, deliveries]
            released += number((yield from call_script(script("release_claims"), [self.keys.stream], args, safe=True)))
        return released

    def pending(self) -> Flow[list[tuple[bytes, int]]]:
        """What is pending for us: entry id and deliveries, ours included."""
        found: list[tuple[bytes, int]] = []
        start: Arg = "-"
        while True:
            page = yield Command(
                ("XPENDING", self.keys.stream, self.group, start, "+", SCRIPT_ENTRIES, self.consumer), safe=True
            )
            found += [(entry[0], number(entry[3])) for entry in page]
            if len(page) < SCRIPT_ENTRIES:
                return found
            start = b"(" + page[-1][0]

    def idle_ms(self) -> Flow[int | None]:
        """How long ago a worker of our name was seen; None where there was none."""
        told = yield from self._workers()
        return next((number(one[b"idle"]) for one in told if plain(one[b"name"]) == self.consumer), None)

    def forget(self, idle_ms: int) -> Flow[list[str]]:
        """Remove the names of workers that have been idle for so long and have nothing pending; which those were."""
        told = yield from self._workers()
        gone = [one[b"name"] for one in told if number(one[b"pending"]) == 0 and number(one[b"idle"]) >= idle_ms]
        return (yield from self._forget(gone))

    def leave(self) -> Flow[list[str]]:
        """Remove our own name, if nothing is pending for it."""
        return (yield from self._forget([self.consumer]))

    def _workers(self) -> Flow[list[dict[bytes, Any]]]:
        found = yield Command(("XINFO", "CONSUMERS", self.keys.stream, self.group), safe=True)
        return [fields(info) for info in found]

    def _forget(self, names: Sequence[Arg]) -> Flow[list[str]]:
        removed: list[str] = []
        for start in range(0, len(names), SCRIPT_ENTRIES):
            args: list[Arg] = [self.group, *names[start : start + SCRIPT_ENTRIES]]
            reply = yield from call_script(script("forget_consumers"), [self.keys.stream], args, safe=True)
            removed += map(plain, reply)
        return removed

    def acks(self, ids: Sequence[bytes]) -> Call:
        return script("ack_delete"), [self.keys.stream], [self.group, *ids]

    def acks_with_results(self, done: Iterable[tuple[bytes, str, bytes]], ttl_s: int) -> Call:
        """Entry id, job id and result of each."""
        keys, args = [self.keys.stream], list[Arg]((self.group, ttl_s))
        for entry_id, job_id, result in done:
            keys.append(self.keys.result(job_id))
            args += [entry_id, result]
        return script("ack_with_results"), keys, args

    def retries(self, failed: Iterable[tuple[bytes, int, bytes]]) -> Call:
        """Entry id, wait in ms and member of each."""
        args: list[Arg] = [self.group, self.consumer]
        for entry_id, delay_ms, member in failed:
            args += [entry_id, delay_ms, member]
        return script("retry_later"), [self.keys.stream, self.keys.delayed], args

    def dead_letters(self, dead: Iterable[DeadLetter], max_len: int) -> Call:
        args: list[Arg] = [self.group, self.consumer, max_len]
        for letter in dead:
            args += [letter.entry_id, letter.data, letter.name, letter.reason, letter.detail, letter.error]
        return script("dead_letter"), [self.keys.stream, self.keys.dlq], args


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job to be given up. ``attempt`` is for events and metrics: it is not stored."""

    entry_id: bytes
    data: bytes
    name: bytes
    reason: str
    attempt: int
    job_id: str = ""
    detail: str = ""
    error: str = ""
