"""``events``: what happens to jobs, as it happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import fields

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.cli.shown import moment, printable
from chasqui.errors import ConfigError
from chasqui.options import RoleOptions, option_duration
from chasqui.protocol.events import Event
from chasqui.queue_events import QueueEvents

_POLL_S = 1.0


def declare(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "events",
        run,
        help="follow what happens to jobs, until Ctrl-C",
        about="An outage of the server is waited out.",
        examples="""
        chasquictl events emails
        chasquictl events emails --event failed --event dlq
        chasquictl events emails --from 0 --no-follow --json > events.jsonl
        """,
        options=RoleOptions,
    )
    parser.add_argument(
        "--from", dest="start", default="$", metavar="ID", help="$ (from now on, the default), 0 (all), or an entry id"
    )
    parser.add_argument("--event", action="append", metavar="NAME", help="only these: active, completed, failed, ...")
    parser.add_argument("--name", help="only jobs of this name")
    parser.add_argument("--id", help="only the job of this id")
    parser.add_argument("--no-follow", action="store_true", help="stop at the end of what is there")
    parser.add_argument("--for", dest="duration", metavar="TIME", help="stop after this time: 30s, 5m")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="stop after so many")


def run(call: Call) -> int:
    args = call.args
    options = call.options(RoleOptions, "")
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    logging.getLogger("chasqui.events").setLevel(logging.WARNING)  # an outage is said while it lasts
    left = args.limit
    try:
        following = QueueEvents(given.pop("url"), start=args.start, **given)
    except ConfigError as error:
        raise ConfigError(error.message.replace("start expects", "--from expects", 1)) from None
    with following as events:
        for event in _read(events, call):
            if not _wanted(event, args.event, args.name, args.id):
                continue
            if call.screen.json:
                call.screen.document(event)
            else:
                call.screen.line(line(event))
            left = None if left is None else left - 1
            if left == 0:
                break
    return Exit.OK


def _read(events: QueueEvents, call: Call) -> Iterator[Event]:
    limit_s = option_duration("--for", call.args.duration) / 1000 if call.args.duration else None
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while True:
        left_s = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
        found = events.poll(0.0 if call.args.no_follow else max(0.0, left_s))
        yield from found
        if (call.args.no_follow and not found) or (deadline is not None and time.monotonic() >= deadline):
            return


def _wanted(event: Event, names: list[str] | None, job_name: str | None, job_id: str | None) -> bool:
    return (
        (names is None or event.name in names)
        and (job_name is None or event.job_name == job_name)
        and (job_id is None or event.job_id == job_id)
    )


def line(event: Event) -> str:
    """An event on one line: time, place, what, and its fields by name."""
    parts = [moment(event.ts_ms), event.entry_id, event.name]
    if event.job_id is not None:
        parts.append(f"id={printable(event.job_id)}")
    if event.job_name:
        parts.append(f"name={printable(event.job_name)}")
    parts += [f"{printable(key)}={printable(value, 80)}" for key, value in sorted(event.fields.items())]
    return " ".join(parts)
