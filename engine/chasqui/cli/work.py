"""``work MODULE:HANDLER``: a worker, from a function that can be imported."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.consumer import Consumer
from chasqui.errors import ConfigError
from chasqui.handlers import BatchHandler, Router
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
        "for in the current directory first. SIGTERM and Ctrl-C end it in good order; a second one at once.",
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
    parser.add_argument("--quiet", action="store_true", help="log warnings only")


def run(call: Call) -> int:
    handler = load(call.args.handler)
    options = call.options(ConsumerOptions, "consumer")
    if not call.args.debug:
        logging.getLogger().setLevel(logging.WARNING if call.args.quiet else logging.INFO)
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    tally = Tally()
    sinks: list[MetricsSink] = [tally]
    if call.args.metrics_port:
        sinks.append(PrometheusSink(options.queue))
    consumer = Consumer(given.pop("url"), metrics=Several(sinks), **given)
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
    return Exit.OK


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


def load(spec: str) -> Any:
    """The handler of that name; every way in which it cannot be had is the user's to mend, and told in a line."""
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"expected MODULE:HANDLER, such as mail:send; got {spec!r:.80}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(f"there is no module {module_name!r:.80} in {here}, nor is one installed") from None
        raise ConfigError(f"{module_name} needs the module {error.name!r}, which is not installed") from None
    except Exception as error:  # noqa: BLE001 - the module is the user's, and may fail in any way
        raise ConfigError(f"{module_name} cannot be imported: {_place(error)}") from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{module_name} has no {path!r:.80}")
        found = getattr(found, name)
    if not isinstance(found, Router | BatchHandler) and not callable(found):
        raise ConfigError(f"{spec} is a {type(found).__name__}; expected a function, a Router or a batch handler")
    return found


def _place(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else said
