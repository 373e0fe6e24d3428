"""``add`` and ``results``: jobs in, what came of them out."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any, NoReturn, TypeVar

from chasqui.cli.command import Call, Exit, Subparsers, add_command, at_least
from chasqui.cli.shown import many, payload
from chasqui.errors import BulkInterrupted, ChasquiError, ConfigError, PayloadError, ResultTimeout
from chasqui.job import Backoff, NewJob, RetryOverride
from chasqui.options import ProducerOptions, option_duration
from chasqui.producer import Producer

T = TypeVar("T")

# Jobs sent in one call when they come from a file.
CHUNK = 10_000
_SHOWN = 400


def declare(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "add",
        add,
        help="add jobs",
        about="A payload is JSON; what is not JSON is taken as text with --text. With --lines every line of the file "
        "(- for standard input) is the payload of one job.",
        examples="""
        chasquictl add emails '{"to": "ana@example.org"}' --name welcome
        chasquictl add emails '{"n": 1}' --id order-17 --delay 15m
        chasquictl add emails --lines orders.jsonl
        jq -c .orders[] big.json | chasquictl add emails --lines -
        """,
        options=ProducerOptions,
    )
    parser.add_argument("payload", nargs="?", metavar="PAYLOAD", help="the payload as JSON")
    parser.add_argument("--lines", metavar="FILE", help="one payload per line of this file; - is standard input")
    parser.add_argument("--text", action="store_true", help="payloads are text, not JSON")
    parser.add_argument("--name", default="", help="name of the jobs, by which workers choose a handler")
    parser.add_argument("--id", help="id of the job: the same id is added once within --dedup-ttl")
    parser.add_argument("--delay", metavar="TIME", help="run after this time: 500ms, 30s, 15m, 24h")
    parser.add_argument("--at", metavar="TIME", help="run at this time: 2026-11-18T10:00:00Z")
    parser.add_argument("--max-attempts", type=at_least(0), metavar="N", help="runs before a job is given up")
    parser.add_argument("--backoff", choices=("fixed", "exponential"), help="how waits before retries grow")
    parser.add_argument("--backoff-delay", metavar="TIME", help="first wait of that back-off")

    parser = add_command(
        commands,
        "results",
        results,
        help="show what handlers returned, by job id",
        about="Workers store results when store_results is set. Exit code 1 when any of them is not there.",
        examples="""
        chasquictl results emails 01JD5M8Z3X
        chasquictl results emails order-17 --wait 30s
        """,
    )
    parser.add_argument("ids", nargs="+", metavar="ID", help="ids of jobs")
    parser.add_argument("--wait", metavar="TIME", help="wait so long for results that are not there yet")


def add(call: Call) -> int:
    args = call.args
    if (args.payload is None) == (args.lines is None):
        raise ConfigError("add takes one PAYLOAD, or --lines FILE: give one of the two")
    if args.lines is not None and args.id is not None:
        raise ConfigError("--id is the id of one job, and --lines adds many")
    delay_ms, run_at_ms = _when(args.delay, args.at)
    retry = _retry(args.max_attempts, args.backoff, args.backoff_delay)

    def job(value: Any) -> NewJob:
        return NewJob(value, id=args.id, name=args.name, retry=retry, delay_ms=delay_ms, run_at_ms=run_at_ms)

    with call.producer() as producer:
        if args.lines is None:
            one = job(_value(args.payload, text=args.text, where="PAYLOAD"))
            with _placed(lambda _: ""):
                ids = producer.add_bulk_jobs([one])
            _tell(call, ids)
            return Exit.OK
        added = _add_lines(call, producer, job)
    if call.screen.json:
        call.screen.document({"queue": args.queue, "added": added})
    else:
        call.screen.line(f"added {many(added, 'job')}")
    return Exit.OK


def _add_lines(call: Call, producer: Producer, job: Callable[[Any], NewJob]) -> int:
    """Send line after line in chunks: a file of any size is never held at once. Cut short, it says what is in already
    and where to go on.
    """
    added = line = unsure = 0

    def so_far() -> str:
        if not added and not unsure:
            return ""
        doubt = f" and up to {many(unsure, 'more job')} after it" if unsure else ""
        file = "FILE" if call.args.lines == "-" else call.args.lines
        rest = f"tail -n +{line + 1} {file} | chasquictl add {call.args.queue} --lines -"
        return f"added {many(added, 'job')}, up to line {line:,}{doubt}; for the rest: {rest}"

    with (
        call.screen.accounting(so_far),
        _opened(call.args.lines) as file,
        call.screen.progress("adding", None) as advance,
    ):
        for chunk in _chunks(_payloads(file, text=call.args.text)):
            unsure = len(chunk)
            try:
                with _placed(partial(_line, chunk)):
                    producer.add_bulk_jobs([job(value) for _, value in chunk])
            except BulkInterrupted as half:
                sure = _leading(half)
                added, unsure = added + sure, half.acknowledged + half.unknown - sure
                line = chunk[sure - 1][0] if sure else line
                raise
            except ChasquiError:
                unsure = 0
                raise
            added, unsure, line = added + len(chunk), 0, chunk[-1][0]
            advance(len(chunk))
    return added


@contextlib.contextmanager
def _placed(place: Callable[[int], str]) -> Iterator[None]:
    """A job that is refused is named by where the user wrote it, and not by its number in our call."""
    try:
        yield
    except (ConfigError, PayloadError) as error:
        found = re.match(r"jobs\[(\d+)\]: ", error.message)
        if found is None:
            raise
        raise type(error)(place(int(found[1])) + error.message[found.end() :]) from None


def _line(chunk: list[tuple[int, Any]], place: int) -> str:
    return f"line {chunk[place][0]}: "


def _leading(half: BulkInterrupted) -> int:
    """How many from the first on are added; those behind a gap are no place to go on from."""
    added = set(half.added)
    return next((place for place, job_id in enumerate(half.ids) if job_id not in added), len(half.ids))


def _tell(call: Call, ids: list[str]) -> None:
    if call.screen.json:
        call.screen.document({"queue": call.args.queue, "ids": ids})
    else:
        for job_id in ids:
            call.screen.line(job_id)


def _opened(path: str) -> IO[str]:
    if path == "-":
        return open(sys.stdin.fileno(), encoding="utf-8", closefd=False)
    try:
        return open(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--lines {path}: {error.strerror or error}") from None


def _payloads(file: Iterable[str], *, text: bool) -> Iterator[tuple[int, Any]]:
    """The payloads, each with the number of its line."""
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _value(line.rstrip("\r\n"), text=text, where=f"line {number}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--lines expects UTF-8: {error}") from None


def _chunks(values: Iterator[T]) -> Iterator[list[T]]:
    chunk: list[T] = []
    for value in values:
        chunk.append(value)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _value(given: str, *, text: bool, where: str) -> Any:
    if text:
        return given
    try:
        return json.loads(given, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); quote it for the shell, or give --text") from None


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"JSON has no {word}")


def _when(delay: str | None, at: str | None) -> tuple[int | None, int | None]:
    if delay is not None and at is not None:
        raise ConfigError("--delay and --at exclude each other: give one")
    if at is None:
        return (None if delay is None else option_duration("--delay", delay)), None
    try:
        found = datetime.fromisoformat(at)
    except ValueError:
        raise ConfigError(f"--at expects a time such as 2026-11-18T10:00:00Z, got {at!r:.80}") from None
    aware = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return None, max(0, int(aware.timestamp() * 1000))


def _retry(max_attempts: int | None, kind: str | None, delay: str | None) -> RetryOverride | None:
    if (kind is None) != (delay is None):
        raise ConfigError("--backoff and --backoff-delay go together: give both or none")
    if max_attempts is None and kind is None:
        return None
    backoff = None if kind is None else Backoff(kind, option_duration("--backoff-delay", str(delay)))
    return RetryOverride(max_attempts, backoff)


def results(call: Call) -> int:
    wait_s = option_duration("--wait", call.args.wait) / 1000 if call.args.wait else 0.0
    found: list[Any] = []
    with call.producer() as producer:
        if wait_s:
            for job_id in call.args.ids:
                try:
                    found.append(producer.wait_for_result(job_id, wait_s))
                except ResultTimeout:
                    found.append(None)
        else:
            found = producer.get_result_bulk(call.args.ids)
    if call.screen.json:
        call.screen.document({"queue": call.args.queue, "results": dict(zip(call.args.ids, found, strict=True))})
    else:
        rows = [
            (i, "-" if value is None else payload(value, _SHOWN)) for i, value in zip(call.args.ids, found, strict=True)
        ]
        call.screen.table(("job", "result"), rows, folded=("result",))
        if any(shown.endswith("…") for _, shown in rows):
            call.screen.say(f"results are cut at {_SHOWN} characters; --json has all of them")
    return Exit.NO if None in found else Exit.OK
