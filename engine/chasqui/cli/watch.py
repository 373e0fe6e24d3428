"""``watch``: a queue as it lives: depth, rates, ages, each with its last minute as a line of bars."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.cli.shown import age, count, moment, printable, spark_line
from chasqui.errors import ConnectionLost
from chasqui.job import Overview
from chasqui.producer import Producer

HISTORY = 120


def declare(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "watch",
        run,
        help="show a queue live, until Ctrl-C",
        about="Without a terminal, or with --json, one line is written for each look.",
        examples="""
        chasquictl watch emails
        chasquictl watch emails --interval-ms 250
        chasquictl watch emails --json --count 10 > minute.jsonl
        """,
    )
    parser.add_argument("--group", default="default", help="consumer group whose workers are shown (default: default)")
    parser.add_argument(
        "--interval-ms", type=at_least(1), default=1000, metavar="N", help="time between two looks (default: 1000)"
    )
    parser.add_argument("--count", type=at_least(1), metavar="N", help="stop after so many looks")


@dataclass(frozen=True, slots=True)
class Rates:
    """Jobs per second between two looks; None where the server does not count, or there was no look before."""

    added: float | None
    settled: float | None
    dead: float | None


def rates(before: Overview | None, now: Overview) -> Rates:
    """What went in and out meanwhile. A job that left the stream was done, put back for a retry, or given up."""
    seconds = 0.0 if before is None else (now.now_ms - before.now_ms) / 1000
    if before is None or seconds <= 0 or before.added is None or now.added is None or now.added < before.added:
        return Rates(None, None, None)
    added = now.added - before.added
    left = added - (now.length - before.length)
    dead = None if before.dead is None or now.dead is None else max(0, now.dead - before.dead) / seconds
    return Rates(added / seconds, max(0, left) / seconds, dead)


def run(call: Call) -> int:
    with call.producer() as producer:
        looks = _looks(call, producer)
        if call.screen.live:
            _draw(call, looks)
        else:
            for seen, rate in looks:
                if call.screen.json:
                    call.screen.document(_as_json(seen, rate))
                else:
                    call.screen.line(_as_line(seen, rate))
    return Exit.OK


def _looks(call: Call, producer: Producer) -> Iterator[tuple[Overview, Rates]]:
    """One look after the other. The first must succeed; later an outage is waited out, and said."""
    before: Overview | None = None
    done = 0
    due = time.monotonic()
    while True:
        try:
            seen = producer.overview(group=call.args.group)
        except ConnectionLost as error:
            if before is None:
                raise
            call.screen.say(f"{error.message} Still trying.")
        else:
            yield seen, rates(before, seen)
            before = seen
            done += 1
        if call.args.count and done >= call.args.count:
            return
        # By the clock and not by adding up: a slow look must not make all later ones late.
        due = max(due + call.args.interval_ms / 1000, time.monotonic())
        time.sleep(min(86_400.0, max(0.0, due - time.monotonic())))


def _as_json(seen: Overview, rate: Rates) -> dict[str, Any]:
    return {
        "at": moment(seen.now_ms),
        "queue": seen.queue,
        "waiting": seen.waiting,
        "pending": seen.pending,
        "delayed": seen.delayed,
        "dlq": seen.dlq,
        "oldest_age_ms": seen.oldest_age_ms,
        "paused": seen.paused,
        "workers": len(seen.workers),
        "added_per_s": _rounded(rate.added),
        "settled_per_s": _rounded(rate.settled),
        "dead_per_s": _rounded(rate.dead),
    }


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)


def _as_line(seen: Overview, rate: Rates) -> str:
    parts = [f"{name}={'-' if value is None else value}" for name, value in _as_json(seen, rate).items()]
    return " ".join(parts).replace("True", "true").replace("False", "false")


class _History:
    """The last looks, as the view shows them."""

    def __init__(self) -> None:
        self.lines: dict[str, deque[float | None]] = {}
        self.first: Overview | None = None

    def view(self, seen: Overview, rate: Rates, width: int) -> Any:
        from rich import box
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        first = self.first = self.first or seen
        bars = max(10, min(HISTORY, width - 62))
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for head, justify in (("", "left"), ("now", "right"), ("since start", "right"), ("history", "left")):
            table.add_column(head, justify=justify, no_wrap=True, overflow="crop")  # type: ignore[arg-type]
        rows: list[tuple[str, float | None, str, int | None, str]] = [
            ("waiting", seen.waiting, count(seen.waiting), seen.waiting - first.waiting, "cyan"),
            ("being worked on", seen.pending, count(seen.pending), seen.pending - first.pending, "cyan"),
            ("oldest job", seen.oldest_age_ms, age(seen.oldest_age_ms) if seen.length else "-", None, "cyan"),
            ("added / s", rate.added, count(rate.added), _grown(first.added, seen.added), "green"),
            ("settled / s", rate.settled, count(rate.settled), None, "green"),
            ("delayed", seen.delayed, count(seen.delayed), seen.delayed - first.delayed, "blue"),
            ("dead letters", seen.dlq, count(seen.dlq), seen.dlq - first.dlq, "red" if seen.dlq else "dim"),
        ]
        for name, value, shown, grown, colour in rows:
            line = self.lines.setdefault(name, deque(maxlen=HISTORY))
            line.append(value)
            delta = "" if not grown else f"{grown:+,}"
            table.add_row(
                name, Text(shown, style="bold"), Text(delta, style="dim"), Text(spark_line(line, bars), colour)
            )
        state = Text("paused", style="bold yellow") if seen.paused else Text("open", style="green")
        title = Text.assemble((printable(seen.queue), "bold"), "  ", state)
        foot = f"{len(seen.workers)} workers   {moment(seen.now_ms)}   Ctrl-C ends"
        return Panel(table, title=title, subtitle=Text(foot, style="dim"), box=box.ROUNDED, padding=(1, 2))


def _grown(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before


def _draw(call: Call, looks: Iterator[tuple[Overview, Rates]]) -> None:
    from rich.live import Live

    history = _History()
    console = call.screen.console
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for seen, rate in looks:
            live.update(history.view(seen, rate, console.width), refresh=True)
