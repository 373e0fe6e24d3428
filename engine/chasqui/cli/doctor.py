"""``doctor``: what is at risk, and what to do about it."""

from __future__ import annotations

from typing import Any

from chasqui.cli.command import Call, Exit, Subparsers, add_command
from chasqui.cli.screen import Screen
from chasqui.cli.shown import printable
from chasqui.doctor import Finding, Severity, gather, judge, worst
from chasqui.options import ConsumerOptions, ProducerOptions
from chasqui.redis_io import Link

_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.DANGER: "bold red"}
_SIGNS = {Severity.OK: "✓", Severity.NOTE: "·", Severity.WARNING: "!", Severity.DANGER: "✗"}


def declare(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "doctor",
        run,
        help="check the server, and a queue, for what endangers jobs",
        about="Changes nothing. Exit code 0: well, or notes only; 1: warnings; 5: jobs can be lost.",
        examples="""
        chasquictl doctor
        chasquictl doctor emails
        chasquictl doctor emails --json | jq '.findings[] | select(.severity == "danger")'
        """,
        queue=False,
        options=ProducerOptions,
    )
    parser.add_argument("queue_name", nargs="?", metavar="QUEUE", help="look at this queue, too")
    parser.add_argument("--group", default="default", help="consumer group to look at (default: default)")


def run(call: Call) -> int:
    args = call.args
    options = call.options(ProducerOptions, "producer")
    claims = call.options(ConsumerOptions, "consumer").claim_min_idle_ms
    queue = args.queue_name or args.queue
    link = Link(options)
    try:
        facts = gather(link, queue, args.group, max_stream_len=options.max_stream_len, stale_ms=claims)
    finally:
        link.close()
    findings = judge(facts)
    verdict = worst(findings)
    if call.screen.json:
        rows = [
            {"check": f.check, "severity": f.severity.name.lower(), "found": f.found, "risk": f.risk, "fix": f.fix}
            for f in findings
        ]
        call.screen.document({"queue": queue, "worst": verdict.name.lower(), "findings": rows})
    else:
        _show(call.screen, findings)
        call.screen.line(_verdict(verdict))
    return {Severity.WARNING: Exit.NO, Severity.DANGER: Exit.DANGER}.get(verdict, Exit.OK)


def _verdict(severity: Severity) -> str:
    return {
        Severity.OK: "all is well",
        Severity.NOTE: "nothing endangers jobs",
        Severity.WARNING: "something wants attention",
        Severity.DANGER: "jobs can be lost",
    }[severity]


def _show(screen: Screen, findings: list[Finding]) -> None:
    """What is wrong last: there a terminal's reader looks first."""
    ordered = sorted(findings, key=lambda f: f.severity)
    if screen.live:
        screen.console.print(_drawn(ordered))
        return
    for f in ordered:
        screen.line(f"{f.severity.name.lower()}  {f.check}: {f.found}")
        if f.risk:
            screen.line(f"    risk: {f.risk}")
            screen.line(f"    fix: {f.fix}")


def _drawn(findings: list[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for f in findings:
        table.add_row(Text(_SIGNS[f.severity], style=_STYLES[f.severity]), f.check, Text(printable(f.found)))
        if f.risk:
            table.add_row("", "", Text.assemble(("risk: ", "dim"), printable(f.risk)))
            table.add_row("", "", Text.assemble(("fix: ", "dim"), printable(f.fix)))
    return table
