"""How often, where to and after which wait a step is sent: the bookkeeping of both drivers, without any I/O."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hiredis

from chasqui.address import Address
from chasqui.errors import ConnectionLost
from chasqui.options import ConnectionOptions
from chasqui.protocol.flow import Batch, Command, Fed, Feed, Refusal
from chasqui.protocol.produce import PASSING
from chasqui.protocol.slots import REDIRECTIONS, UNSETTLED, Place
from chasqui.redis_errors import told

log = logging.getLogger("chasqui.redis")
_ASKING = hiredis.pack_command(("ASKING",))


class Tries:
    """A step on its way: what of it is still to be sent, where to, and after which wait. Both colours drive it.

    One number of tries for all that can go wrong. What a server has answered stays answered; only the rest is sent
    again. A first redirection is followed at once and costs no try: it is how a client of a cluster hears of a move.
    """

    def __init__(self, step: Command | Batch | Feed, options: ConnectionOptions, address: Address) -> None:
        self._step, self._options, self._address = step, options, address
        self._commands = () if isinstance(step, Feed) else step.commands if isinstance(step, Batch) else (step,)
        self._replies: list[Any] = [None] * len(self._commands)
        self._left = list(range(len(self._commands)))
        self._fed: Fed | None = None
        self._failures = 0
        self._followed = self._sent = False
        # In a batch only what has to do with slots is sent again here; the rest is in the list, for the flow.
        passing = UNSETTLED if isinstance(step, Batch) else PASSING
        self._passing = passing if address.kind == "cluster" else passing - REDIRECTIONS
        self.key = step.key if isinstance(step, Feed) else _key_of(self._commands)
        self.wait_ms = 0 if isinstance(step, Feed) else step.wait_ms
        self._as_bytes = step.as_bytes if isinstance(step, Command) else 0
        self.ask: Place | None = None
        self.wait_s = 0.0
        self.over = self.look_again = False

    @property
    def as_bytes(self) -> int:
        """How many bytes will do for a reply; none behind ASKING, where there are two."""
        return 0 if self.ask else self._as_bytes

    def packed(self) -> list[bytes]:
        asking = (_ASKING,) if self.ask else ()
        return [
            data
            for i in self._left
            for data in (*asking, hiredis.pack_command(self._commands[i].args))  # type: ignore[arg-type]
        ]

    def pieces(self, feed: Feed) -> Iterator[tuple[bytes, int]]:
        """The bytes of a feed and how many answers they will bring: with ASKING before each command, twice as many."""
        return _asking(feed.pieces()) if self.ask else feed.pieces()

    def taken(self, replies: list[Refusal | None], sent: int, pool: Any) -> Fed:
        each = 2 if self.ask else 1
        return Fed(self.heard(replies, pool), sent // each)

    def cut_off(self, replies: list[Refusal | None], sent: int, stopped: ConnectionLost | Refusal) -> Fed:
        """A feed that broke half way. Some refusals close the connection: they answer the first that has no answer."""
        each = 2 if self.ask else 1
        heard = replies[each - 1 :: each]
        self.ask = None
        if isinstance(stopped, ConnectionLost):
            return Fed(heard, sent // each, stopped)
        if not heard:
            raise stopped
        return Fed([*heard, stopped], sent // each)

    def heard(self, replies: list[Any], pool: Any) -> list[Any]:
        """The answers, without those to ASKING. Where they redirect, the next try goes there."""
        if self.ask:
            replies = replies[1::2]
        if self._address.kind == "cluster":
            self.ask = None
            for reply in replies:
                if type(reply) is Refusal and reply.code in REDIRECTIONS:
                    self.ask = pool.slots.follow(reply, pool.place)
        return replies

    def answered(self, replies: list[Any]) -> None:
        self.look_again = False
        for i, reply in zip(self._left, replies, strict=True):
            self._replies[i] = reply
        refused = {i: self._replies[i].code for i in self._left if type(self._replies[i]) is Refusal}
        left = [i for i, code in refused.items() if code in self._passing]
        if left and self._again({refused[i] for i in left}):
            self._left = left
        else:
            self.over = True
        # Whoever sends it again must not come upon the same replica.
        self.look_again |= "READONLY" in refused.values()

    def fed(self, fed: Fed) -> None:
        """A feed of which nothing was taken is sent again here; what to do about a part of one, the flow knows."""
        self._fed, self.over = fed, True
        codes = {reply.code for reply in fed.replies if reply is not None} if fed.refused else set[str]()
        if codes and not fed.broken and None not in fed.replies and codes <= UNSETTLED:
            self.over = not self._again(codes)
            self._fed = replace(fed, final=True)
        else:
            self.look_again = not codes.isdisjoint(PASSING - REDIRECTIONS)

    def lost(self, lost: ConnectionLost) -> None:
        self.ask = None
        self._sent = self._sent or lost.sent
        safe = not self._sent or all(self._commands[i].safe for i in self._left)
        if not safe or not self._again(set()):
            raise told(lost, sent=self._sent or len(self._left) < len(self._commands)) from None
        log.info("%s; trying again (%d)", lost.message, self._failures)

    def refused(self, refusal: Refusal) -> None:
        """One answer for all that was sent."""
        if refusal.code in PASSING and self._again({refusal.code}):
            return
        if len(self._left) == len(self._commands):
            raise refusal
        for i in self._left:
            self._replies[i] = refusal
        self.over = True

    def result(self) -> Any:
        if self._fed is not None:
            return self._fed
        return self._replies if isinstance(self._step, Batch) else single(self._replies[0])

    def _again(self, codes: set[str]) -> bool:
        """Whether there is another try, for that reason (none: a lost connection), and after which wait."""
        self.look_again = not codes <= REDIRECTIONS | {"TRYAGAIN"}
        self.wait_s = 0.0
        if codes and codes <= REDIRECTIONS and not self._followed:
            self._followed = True
            return True
        if self._failures == self._options.reconnect_attempts:
            return False
        self.wait_s = backoff_s(self._failures, self._options)
        self._failures += 1
        return True


def _asking(pieces: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    reader = hiredis.Reader()
    for piece, count in pieces:
        reader.feed(piece)
        commands = [hiredis.pack_command(tuple(reader.gets())) for _ in range(count)]
        yield b"".join(data for command in commands for data in (_ASKING, command)), 2 * count


def backoff_s(attempt: int, options: ConnectionOptions) -> float:
    """Capped exponential wait with jitter: between half and all of it, so that a fleet does not return as one."""
    ceiling = min(options.reconnect_max_ms, options.reconnect_initial_ms * 2 ** min(attempt, 30))
    return float(ceiling * random.uniform(0.5, 1.0) / 1000)


def _key_of(commands: tuple[Command, ...]) -> str | None:
    """The key that routes a step in a cluster: all keys of a step belong to one queue, hence to one slot."""
    for command in commands:
        if command.route is not None:
            return command.route
        for arg in command.args[1:]:
            if isinstance(arg, str) and arg.startswith("{"):
                return arg
    return None


def single(reply: Any) -> Any:
    if isinstance(reply, Refusal):
        raise reply
    return reply
