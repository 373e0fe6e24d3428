"""What commands have in common: how they are declared, their options, and how they end."""

from __future__ import annotations

import argparse
import difflib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

from chasqui.cli.screen import Screen
from chasqui.errors import ConfigError
from chasqui.options import ConnectionOptions, ProducerOptions
from chasqui.producer import Producer
from chasqui.settings import add_arguments, collect

Options = TypeVar("Options", bound=ConnectionOptions)
Subparsers = Any
"""argparse's own type for a set of commands has no public name."""

_AGO = re.compile(r"(\d{1,9})(ms|s|m|h|d)", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Exit(IntEnum):
    """How a command ends. Scripts rely on these: a number never changes its meaning."""

    OK = 0
    NO = 1
    """Done, and the answer is no: nothing found, not carried out, or a warning."""
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    """The server answered with an error: no permission, read-only, out of memory, queue full."""
    DANGER = 5
    """doctor: jobs can be lost."""
    INTERRUPTED = 130


@dataclass(frozen=True)
class Call:
    """One call of a command: its arguments, the file of options, and where to write."""

    args: argparse.Namespace
    screen: Screen
    file: Mapping[str, Any] | None

    def options(self, cls: type[Options], table: str, **fixed: Any) -> Options:
        """The options of a role, from flags, environment and file."""
        return collect(cls, vars(self.args) | fixed, table=table, file=self.file)

    def producer(self, **fixed: Any) -> Producer:
        """A producer for the queue of this call."""
        options = self.options(ProducerOptions, "producer", **fixed)
        given = {f.name: getattr(options, f.name) for f in fields(options)}
        return Producer(given.pop("url"), **given)


Run = Callable[[Call], int]


def add_command(
    parsers: Subparsers,
    name: str,
    run: Run | None,
    *,
    help: str,
    examples: str = "",
    about: str = "",
    queue: bool = True,
    options: type[ConnectionOptions] = ConnectionOptions,
) -> argparse.ArgumentParser:
    """Declare a command. Without ``run`` it is a group of commands."""
    lines = [f"  {line.strip()}" for line in examples.strip().splitlines()]
    parser: Parser = parsers.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.{' ' if about else ''}{about}",
        epilog="\n".join(["examples:", *lines]) if lines else None,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    if run is None:
        return parser
    parser.set_defaults(run=run, parser=parser)
    if queue:
        parser.add_argument("queue", metavar="QUEUE", help="the queue's name")
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    group = parser.add_argument_group(
        "options of the connection and the role",
        "Each is also read from the environment (CHASQUI_...) and from the file that --config names.",
    )
    group.add_argument("--config", metavar="FILE", help="TOML file of options (also: CHASQUI_CONFIG)")
    add_arguments(group, options, skip=("queue",) if queue else ())
    return parser


class Parser(argparse.ArgumentParser):
    """Says of a word that it does not know which one was meant."""

    def error(self, message: str) -> NoReturn:
        words = [str(choice) for action in self._actions for choice in action.choices or ()]
        given = re.search("invalid choice: '(.*?)'", message)
        super().error(message + _nearest(given[1], words) if given else message)

    def refuse(self, word: str) -> NoReturn:
        """End because of an argument that is none of this command's."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        self.error(f"unknown argument {word!r:.80}{_nearest(word.partition('=')[0], flags)}")


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they stand; wraps everything else. The line of usage has what must be given; the list below it
    has the options, of which there are many.
    """

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        either = [group for group in groups if group.required]
        needed = [action for group in either for action in group._group_actions]
        needed += [argparse.Action([], "options", nargs="?", metavar="options")]
        needed += [action for action in actions if action.required or not action.option_strings]
        super().add_usage(usage, needed, either, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def past_ms(text: str, now_ms: int | None = None) -> int:
    """A moment as people write it: `15m` ago, an ISO time, or epoch milliseconds."""
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    if match := _AGO.fullmatch(text.strip()):
        return max(0, now - int(match[1]) * _UNIT_MS[match[2]])
    if re.fullmatch(r"\d{10,16}", text.strip(), re.ASCII):
        return int(text)
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"--since expects a time such as 15m (ago), 2026-11-18T10:00:00Z or epoch milliseconds, got {text!r:.80}"
        ) from None
    aware = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return max(0, int(aware.timestamp() * 1000))


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number from there on."""

    def whole_number(text: str) -> int:
        if not re.fullmatch(r"\d{1,15}", text, re.ASCII) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, at least {least}; got {text!r:.80}")
        return int(text)

    return whole_number
