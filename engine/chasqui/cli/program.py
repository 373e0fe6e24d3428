"""The program: its commands put together, and every way to end turned into an exit code."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from chasqui.cli import (
    bench,
    dead_letters,
    delayed,
    doctor,
    events,
    inspect,
    jobs,
    pausing,
    repeatable,
    transactions,
    watch,
    work,
)
from chasqui.cli.command import Call, Exit, Formatter, Parser
from chasqui.cli.screen import OutputLost, Screen, drop_output, prepare_streams
from chasqui.cli.shown import printable
from chasqui.errors import (
    BulkInterrupted,
    ChasquiError,
    ConfigError,
    ConnectionLost,
    PayloadError,
    QueueFull,
    RedisError,
)
from chasqui.options import ConnectionOptions
from chasqui.protocol import examine
from chasqui.protocol.keys import Keys
from chasqui.redis_io import Link
from chasqui.settings import read_file
from chasqui.version import __version__

EPILOG = """examples:
  chasquictl inspect emails                          what is in the queue, who works on it
  chasquictl watch emails                            the same, live
  chasquictl add emails '{"to": "ana@example.org"}'  add a job
  chasquictl dlq filter emails --since 1h            what failed in the last hour, by reason and name
  chasquictl doctor emails                           is the server fit for this, is the queue healthy

Where the server is: --url, else CHASQUI_URL, else the url of the file that --config or CHASQUI_CONFIG names, else
redis://127.0.0.1:6379/0. A url with a password belongs into the environment or the file: flags can be seen by others.

exit codes: 0 done, 1 nothing found or not carried out, 2 wrong usage, 3 server unreachable, 4 refused by the server,
5 doctor found that jobs can be lost, 130 interrupted."""

COMMANDS = (inspect, watch, jobs, work, dead_letters, delayed, repeatable, events, pausing, transactions, doctor, bench)


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    top = Parser(
        prog="chasquictl",
        description="Look at job queues, repair them, and work on them.",
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"chasquictl {__version__}")
    top.add_argument("--debug", action="store_true", help="log what happens, and show tracebacks")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=top.prog)
    for module in COMMANDS:
        module.declare(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    prepare_streams()
    screen = Screen()
    debug, call = False, None
    try:
        args = _parsed(argv)
        if isinstance(args, int):
            return args
        debug, screen = args.debug, Screen(as_json=args.json)
        _set_up_logs(debug)
        path = os.environ.get("CHASQUI_CONFIG") if args.config is None else args.config
        call = Call(args, screen, None if path is None else read_file(path))
        return int(args.run(call))
    except KeyboardInterrupt:
        # A second one, while the program ends, ends it without a word.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return Exit.INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return Exit.OK
    except OutputLost as error:
        drop_output()
        screen.say(f"chasquictl: {error}")
        return Exit.NO
    except ChasquiError as error:
        if debug:
            raise
        where = _strangers(call) if call and "WRONGTYPE" in error.message else ""
        screen.say(f"chasquictl: {error.message}{where}")
        return code_of(error)
    except Exception as error:
        if debug:
            raise
        where = f" {error.filename}:" if isinstance(error, OSError) and error.filename else ""
        screen.say(f"chasquictl:{where} {type(error).__name__}: {error} (--debug shows where)")
        return Exit.NO


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace | int:
    """The arguments, or how to end: argparse has said what is wrong, or has shown the help."""
    try:
        args, unknown = parser().parse_known_args(argv)
        if unknown:
            args.parser.refuse(unknown[0])
        return args
    except SystemExit as stop:
        sys.stdout.flush()  # here, where a reader that has gone is noticed and is no failure
        return int(stop.code or 0)


def _strangers(call: Call) -> str:
    """Which keys have the wrong type: the server does not say."""
    queue = getattr(call.args, "queue", None)
    try:
        with contextlib.closing(Link(call.options(ConnectionOptions, ""))) as link:
            found = link.run(examine.strangers(Keys(queue))) if queue else []
    except ChasquiError:
        return ""
    return "".join(f"; {key} holds a {kind}, where a queue has a {expected}" for key, kind, expected in found)


def _set_up_logs(debug: bool) -> None:
    """Logs of the engine would disturb a view; a worker sets up its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("%(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, handlers=[handler])


class _Plain(logging.Formatter):
    """Makes messages printable: they may quote what a server or a handler has said."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's own name)
        return printable(super().formatMessage(record))


def code_of(error: ChasquiError) -> Exit:
    """How a command ends that failed so; half a bulk ends as what stopped it."""
    if isinstance(error, BulkInterrupted) and isinstance(error.__cause__, ChasquiError):
        return code_of(error.__cause__)
    if isinstance(error, ConfigError | PayloadError):
        return Exit.USAGE
    if isinstance(error, ConnectionLost):
        return Exit.UNREACHABLE
    if isinstance(error, RedisError | QueueFull):
        return Exit.REFUSED
    return Exit.NO
