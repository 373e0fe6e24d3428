"""Flows: operations as generators that yield what to send and are sent the raw replies.

A flow yields a ``Command``, a ``Batch`` (one round trip for several commands), a ``Feed`` (bytes that are already
protocol, made while the server works on the ones before) or a ``Pause``, and returns its result. The driver throws
into it a ``Refusal`` where the server answered a single command with an error, and ``ConnectionLost`` where the
connection broke and the driver may not send again by itself. In a batch or feed, errors are values in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from chasqui.errors import ConnectionLost
from chasqui.protocol.scripts import Script

Arg: TypeAlias = bytes | str | int
T = TypeVar("T")


class Refusal(Exception):
    """An error reply: the first word is its code (NOSCRIPT, WRONGTYPE, OOM...)."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Command:
    """One command. ``safe``: carrying it out twice is the same as once, so a lost reply is no reason to give up.

    ``wait_ms``: how long the server may block on it, on top of the ordinary time-out. ``route``: a key whose place in a
    cluster it goes to, where it names no key itself. ``as_bytes``: the reply may come as the bytes that it is, and does
    where the connection lets the driver have its socket; of one that has more than so many it comes as ``TooLong``.
    """

    args: tuple[Arg, ...]
    safe: bool = False
    wait_ms: int = 0
    route: str | None = None
    as_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TooLong:
    """A reply that was not read to its end; the connection on which it came is closed."""

    read: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Several commands, one round trip, no transaction. The reply is a list of the same length."""

    commands: tuple[Command, ...]

    @property
    def safe(self) -> bool:
        return all(command.safe for command in self.commands)

    @property
    def wait_ms(self) -> int:
        return max((command.wait_ms for command in self.commands), default=0)


@dataclass(frozen=True, slots=True)
class Feed:
    """Commands that are protocol bytes already, sent while later ones are still being made.

    ``pieces`` yields bytes and the number of commands in them; at most ``window`` commands are unanswered at a time.
    ``key`` routes it in a cluster. The reply is ``Fed``: a refusal ends the sending, it is not raised.
    """

    key: str
    pieces: Callable[[], Iterator[tuple[bytes, int]]]
    window: int = 1000


@dataclass(frozen=True, slots=True)
class Fed:
    """What came of a feed: for each answered command None or its refusal, how many were sent, and what broke it.

    ``final``: it was refused as a whole, each time that the driver may try.
    """

    replies: list[Refusal | None]
    sent: int
    broken: ConnectionLost | None = None
    final: bool = False

    @property
    def refused(self) -> bool:
        return self.replies.count(None) != len(self.replies)

    def first_refused(self) -> int:
        """The place of the first refusal; the number of replies when there is none."""
        if not self.refused:
            return len(self.replies)
        return next(i for i, reply in enumerate(self.replies) if reply is not None)


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait; nothing is sent. ``attempt`` (from 0) asks for the connection's own back-off instead of ``ms``."""

    ms: int = 0
    attempt: int | None = None


Step: TypeAlias = Command | Batch | Feed | Pause
Flow: TypeAlias = Generator[Step, Any, T]


def command(*args: Arg, safe: bool = False, wait_ms: int = 0, route: str | None = None) -> Command:
    return Command(args, safe, wait_ms, route)


def call_script(script: Script, keys: list[str], args: list[Arg], *, safe: bool = False) -> Flow[Any]:
    """Run a script by its hash; where the server does not have it, send it along once."""
    rest: tuple[Arg, ...] = (len(keys), *keys, *args)
    try:
        return (yield Command(("EVALSHA", script.sha, *rest), safe))
    except Refusal as refusal:
        if refusal.code != "NOSCRIPT":
            raise
    return (yield Command(("EVAL", script.source, *rest), safe))


def call_scripts(calls: Sequence[tuple[Script, list[str], list[Arg]]], *, safe: bool = False) -> Flow[list[Any]]:
    """Many script calls in one round trip; only the calls that were refused for NOSCRIPT are sent again."""
    rests = [(len(keys), *keys, *args) for _, keys, args in calls]
    replies = yield Batch(
        tuple(Command(("EVALSHA", call[0].sha, *rest), safe) for call, rest in zip(calls, rests, strict=True))
    )
    missing = [i for i, reply in enumerate(replies) if isinstance(reply, Refusal) and reply.code == "NOSCRIPT"]
    if missing:
        again = yield Batch(tuple(Command(("EVAL", calls[i][0].source, *rests[i]), safe) for i in missing))
        for i, reply in zip(missing, again, strict=True):
            replies[i] = reply
    return list(replies)


def values(replies: list[Any]) -> list[Any]:
    """The replies of a batch, or its first error raised."""
    for reply in replies:
        if isinstance(reply, Refusal):
            raise reply
    return replies
