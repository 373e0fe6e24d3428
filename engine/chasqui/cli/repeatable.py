"""``repeatable``: jobs that fire by the clock."""

from __future__ import annotations

import json

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.cli.shown import count, moment
from chasqui.errors import ConfigError
from chasqui.options import option_duration
from chasqui.repeat import MissedFires, RepeatableMeta, RepeatableSpec, RepeatPattern


def declare(commands: Subparsers) -> None:
    group = add_command(commands, "repeatable", None, help="repeatable jobs: list, upsert, remove")
    repeatable = group.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=group.prog)
    parser = add_command(
        repeatable,
        "list",
        list_,
        help="show the repeatable jobs that fire next",
        examples="chasquictl repeatable list emails",
    )
    parser.add_argument("--limit", type=at_least(0), default=100, metavar="N", help="how many at most (default: 100)")
    parser = add_command(
        repeatable,
        "upsert",
        upsert,
        help="store a repeatable job, or overwrite the one of the same key",
        about="Its key is --key, or is made of name and pattern. A worker or a scheduler fires it.",
        examples="""
        chasquictl repeatable upsert emails digest --cron '0 7 * * MON-FRI' --tz Europe/Madrid
        chasquictl repeatable upsert emails ping --every 30s --payload '{"to": "all"}' --limit 10
        """,
    )
    parser.add_argument("job_name", metavar="NAME", help="name of the jobs that it fires")
    when = parser.add_mutually_exclusive_group(required=True)
    when.add_argument("--cron", metavar="EXPRESSION", help="5 fields, 6 with seconds first, 7 with the year last")
    when.add_argument("--every", metavar="TIME", help="a fixed interval: 30s, 15m, 24h")
    parser.add_argument("--tz", metavar="ZONE", help="time zone of the cron expression (default: UTC)")
    parser.add_argument("--payload", default="null", metavar="JSON", help="payload of the jobs (default: null)")
    parser.add_argument("--key", default="", help="key to store it under")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="fire so often, then remove it")
    parser.add_argument(
        "--missed",
        default="skip",
        metavar="{skip,once,N}",
        help="fires missed while nobody scheduled: skip them, fire once, or catch up on at most N (default: skip)",
    )
    parser = add_command(
        repeatable,
        "remove",
        remove,
        help="remove a repeatable job by its key",
        about="Jobs that it has fired stay. Exit code 1 when there is none of that key.",
        examples="chasquictl repeatable remove emails 'ping::every:30000'",
    )
    parser.add_argument("key", metavar="KEY", help="its key, as `repeatable list` shows it")


def list_(call: Call) -> int:
    with call.producer() as producer:
        specs = producer.list_repeatable(call.args.limit)
    if call.screen.json:
        entries = [
            {
                "key": s.key,
                "job_name": s.job_name,
                "pattern": _pattern(s),
                "tz": s.pattern.tz,
                "next_fire": moment(s.next_fire_ms),
                "next_fire_ms": s.next_fire_ms,
                "limit": s.limit,
                "missed_fires": s.missed_fires.kind,
            }
            for s in specs
        ]
        call.screen.document({"queue": call.args.queue, "repeatable": entries})
        return Exit.OK
    rows = [
        (
            s.key,
            s.job_name or "-",
            _pattern(s),
            (s.pattern.tz or "UTC") if s.pattern.expression is not None else "-",
            moment(s.next_fire_ms),
            count(s.limit) if s.limit else "-",
        )
        for s in specs
    ]
    call.screen.table(
        ("key", "name", "pattern", "zone", "next fire", "limit"), rows, numbers=("limit",), folded=("key",)
    )
    return Exit.OK


def _pattern(spec: RepeatableMeta) -> str:
    return spec.pattern.expression if spec.pattern.expression is not None else f"every {spec.pattern.interval_ms}ms"


def upsert(call: Call) -> int:
    args = call.args
    if args.cron is not None:
        pattern = RepeatPattern.cron(args.cron, args.tz)
    elif args.tz is not None:
        raise ConfigError("--tz is the zone of a cron expression, and --every has none")
    else:
        interval_ms = option_duration("--every", args.every)
        if interval_ms < 1:
            raise ConfigError(f"--every expects a time of at least 1ms, got {args.every!r:.80}")
        pattern = RepeatPattern.every(interval_ms)
    try:
        payload = json.loads(args.payload)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--payload is not JSON: {error}") from None
    spec = RepeatableSpec(
        args.job_name, pattern, payload, key=args.key, limit=args.limit, missed_fires=_missed(args.missed)
    )
    with call.producer() as producer:
        key = producer.upsert_repeatable(spec)
    if call.screen.json:
        call.screen.document({"queue": args.queue, "key": key})
    else:
        call.screen.line(key)
    return Exit.OK


def _missed(text: str) -> MissedFires:
    if text in ("skip", "once"):
        return MissedFires.skip() if text == "skip" else MissedFires.fire_once()
    if text.isascii() and text.isdecimal() and len(text) < 11:
        return MissedFires.fire_all(int(text))
    raise ConfigError(f"--missed expects skip, once or a number, got {text!r:.80}")


def remove(call: Call) -> int:
    with call.producer() as producer:
        removed = producer.remove_repeatable(call.args.key)
    if call.screen.json:
        call.screen.document({"queue": call.args.queue, "key": call.args.key, "removed": removed})
    else:
        call.screen.line("removed" if removed else "not found")
    return Exit.OK if removed else Exit.NO
