"""The program: its commands put together, and every way to end turned into an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
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
from chasqui.cli.command import Call, Exit, Formatter
from chasqui.cli.screen import Screen
from chasqui.errors import (
    BulkInterrupted,
    ChasquiError,
    ConfigError,
    ConnectionLost,
    PayloadError,
    QueueFull,
    RedisError,
)
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
    top = argparse.ArgumentParser(
        prog="chasquictl",
        description="Look at job queues, repair them, and work on them.",
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"chasquictl {__version__}")
    top.add_argument("--debug", action="store_true", help="log what happens, and show tracebacks")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.declare(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or has shown the help
        return int(stop.code or 0)
    # Logs of the engine would disturb a view; a worker sets up its own.
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.ERROR, format="%(levelname)s %(name)s %(message)s"
    )
    screen = Screen(as_json=args.json)
    try:
        path = args.config or os.environ.get("CHASQUI_CONFIG")
        return int(args.run(Call(args, screen, read_file(path) if path else None)))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except ChasquiError as error:
        if args.debug:
            raise
        screen.say(f"chasquictl: {error.message}")
        return code_of(error)


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
