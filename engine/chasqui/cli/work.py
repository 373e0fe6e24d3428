"""``work MODULE:HANDLER``: a worker, from a function that can be imported."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import fields
from typing import Any

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.consumer import Consumer
from chasqui.loading import load_handler
from chasqui.metrics import DlqRouted, JobOutcome, RetryScheduled
from chasqui.options import ConsumerOptions
from chasqui.sinks import HOOKS, MetricsSink, NoopSink, PrometheusSink, serve


def declare(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "work",
        run,
        help="run a worker",
        about="The handler is a function of one job, plain or async, a Router, or a batch handler. Modules are looked "
        "for in the current directory first. Failed runs are logged. SIGTERM and Ctrl-C end it in good order, a second "
        "one at once and with exit code 130. An outage of the server is waited out.",
        examples="""
        chasquictl work mail:send --queue emails
        chasquictl work shop.jobs:router --queue orders --concurrency 20 --store-results
        chasquictl work mail:send --queue emails --metrics-port 9100
        """,
        queue=False,
        options=ConsumerOptions,
    )
    parser.add_argument("handler", metavar="MODULE:HANDLER", help="what to run, such as mail:send")
    parser.add_argument("--metrics-port", type=at_least(1), metavar="N", help="serve metrics and health on this port")
    parser.add_argument("--metrics-address", default="127.0.0.1", metavar="HOST", help="where (default: 127.0.0.1)")
    parser.add_argument("--quiet", action="store_true", help="log warnings only, and no failed runs")


def run(call: Call) -> int:
    handler = load_handler(call.args.handler)
    options = call.options(ConsumerOptions, "consumer")
    if not call.args.debug:
        logging.getLogger().setLevel(logging.WARNING if call.args.quiet else logging.INFO)
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    tally = Tally()
    prometheus = PrometheusSink(options.queue) if call.args.metrics_port else None
    sinks: list[MetricsSink] = [tally] if prometheus is None else [tally, prometheus]
    consumer = Consumer(given.pop("url"), metrics=Several(sinks), **given)
    if prometheus is not None:
        prometheus.watch_health(lambda: consumer.healthy)
    if not call.args.quiet:
        call.screen.say(
            f"working on {options.queue} with {call.args.handler} as {consumer.consumer_id}; Ctrl-C ends it"
        )
    started = time.monotonic()
    with contextlib.ExitStack() as ends:
        if call.args.metrics_port:
            address, port = call.args.metrics_address, call.args.metrics_port
            ends.enter_context(serve(port, address=address, healthy=lambda: consumer.healthy))
        consumer.run_sync(handler)
    _sum_up(call, tally, time.monotonic() - started)
    return Exit.INTERRUPTED if consumer.ended_at_once else Exit.OK


class Tally(NoopSink):
    """Counts for the line at the end."""

    def __init__(self) -> None:
        self.done = self.failed = self.retried = self.dead = 0

    def job_outcome(self, event: JobOutcome) -> None:
        if event.kind == "ok":
            self.done += 1
        else:
            self.failed += 1

    def retry_scheduled(self, event: RetryScheduled) -> None:
        self.retried += 1

    def dlq_routed(self, event: DlqRouted) -> None:
        self.dead += 1


class Several(NoopSink):
    """Tells every sink of a list."""

    def __init__(self, sinks: list[MetricsSink]) -> None:
        for hook in HOOKS:
            calls = [getattr(sink, hook) for sink in sinks]
            setattr(self, hook, lambda event, calls=calls: [call(event) for call in calls])


def _sum_up(call: Call, tally: Tally, seconds: float) -> None:
    figures: dict[str, Any] = {name: getattr(tally, name) for name in ("done", "failed", "retried", "dead")}
    if call.screen.json:
        call.screen.document(figures | {"seconds": round(seconds, 3)})
    elif not call.args.quiet:
        call.screen.line(", ".join(f"{count} {name}" for name, count in figures.items()) + f" in {seconds:.1f} s")
