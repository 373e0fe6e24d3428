"""``pause`` and ``resume``."""

from __future__ import annotations

from chasqui.cli.command import Call, Exit, Subparsers, add_command


def declare(commands: Subparsers) -> None:
    add_command(
        commands,
        "pause",
        pause,
        help="make workers stop taking jobs; adding goes on",
        examples="chasquictl pause emails",
    )
    add_command(commands, "resume", resume, help="end a pause", examples="chasquictl resume emails")


def pause(call: Call) -> int:
    return _set(call, paused=True)


def resume(call: Call) -> int:
    return _set(call, paused=False)


def _set(call: Call, *, paused: bool) -> int:
    with call.producer() as producer:
        if paused:
            producer.pause()
        else:
            producer.resume()
    if call.screen.json:
        call.screen.document({"queue": call.args.queue, "paused": paused})
    else:
        call.screen.line("paused" if paused else "resumed")
    return Exit.OK
