"""``inspect``: a queue at one moment."""

from __future__ import annotations

from chasqui.cli.command import Call, Exit, Subparsers, add_command
from chasqui.cli.shown import age, count, moment
from chasqui.job import Overview


def declare(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "inspect",
        run,
        help="show what is in a queue and who works on it",
        examples="""
        chasquictl inspect emails
        chasquictl inspect emails --json | jq .waiting
        """,
    )
    parser.add_argument("--group", default="default", help="consumer group whose workers are shown (default: default)")


def run(call: Call) -> int:
    with call.producer() as producer:
        seen = producer.overview(group=call.args.group)
    if call.screen.json:
        call.screen.document(seen)
        return Exit.OK
    call.screen.table(("queue", seen.queue), figures(seen))
    if seen.workers:
        rows = [(w.name, count(w.pending), age(w.idle_ms)) for w in sorted(seen.workers, key=lambda w: w.name)]
        call.screen.line("")
        call.screen.table(("worker", "holds", "last heard of"), rows, numbers=("holds", "last heard of"))
    return Exit.OK


def figures(seen: Overview) -> list[tuple[str, str]]:
    """The figures of a queue, each with its name."""
    due = "-" if seen.next_due_ms is None else moment(seen.next_due_ms)
    return [
        ("state", "paused" if seen.paused else "open"),
        ("stream depth", count(seen.length)),
        ("  waiting", count(seen.waiting)),
        ("  being worked on", count(seen.pending) if seen.group_exists else f"- (no group {seen.group!r} yet)"),
        ("  age of the oldest", age(seen.oldest_age_ms) if seen.length else "-"),
        ("delayed", count(seen.delayed)),
        ("  next due", due),
        ("  overdue by", age(seen.delayed_lag_ms) if seen.delayed_lag_ms else "-"),
        ("dead letters", count(seen.dlq)),
        ("repeatable jobs", count(seen.repeatable)),
        ("events kept", count(seen.events)),
        ("workers", count(len(seen.workers))),
        ("promoter", seen.promoter or "nobody leads"),
        ("scheduler", seen.scheduler or "nobody leads"),
    ]
