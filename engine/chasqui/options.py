"""Options, each declared once: a frozen dataclass per role, whose fields carry help, bounds and choices.

One Python name gives every spelling: ``max_stream_len`` is ``maxStreamLen`` for Spark, ``--max-stream-len`` on the
command line, ``CHASQUI_MAX_STREAM_LEN`` in the environment and ``max_stream_len`` in TOML. Values are checked when
the dataclass is made, so code that builds it directly is checked too. Secrets stay out of ``repr``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal, TypeVar

from chasqui.errors import OptionError

Spelling = Literal["python", "spark", "cli", "env", "toml"]
Options = TypeVar("Options")

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*(ms|s|min|m|h|d)?", re.ASCII)
# Numbers beyond it, where an option has no bound of its own: no clock, server or script could do with them.
MOST = 10**12
DAY_MS, _YEAR_SECS = 86_400_000, 365 * 86_400
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


@dataclass(frozen=True)
class Rule:
    """What an option takes; kept in the metadata of its field."""

    help: str
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] | None = None
    secret: bool = False
    duration: bool = False


def option(
    default: Any,
    *,
    help: str,
    min: float | None = None,
    max: float | None = None,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
    duration: bool = False,
) -> Any:
    """A dataclass field that is an option. A ``duration`` holds milliseconds, and takes ``"24h"`` or timedelta too."""
    rule = Rule(help, min, max, choices, secret, duration)
    return dataclasses.field(default=default, repr=not secret, metadata={"rule": rule})


def spell(name: str, spelling: Spelling) -> str:
    """The option's name as it is written in that place."""
    if spelling == "spark":
        head, *rest = name.split("_")
        return head + "".join(word.capitalize() for word in rest)
    if spelling == "cli":
        return "--" + name.replace("_", "-")
    if spelling == "env":
        return "CHASQUI_" + name.upper()
    return name


def build(cls: type[Options], given: Mapping[str, Any], *, spelling: Spelling = "python") -> Options:
    """Make the options from names and values as a user wrote them; the error speaks the user's spelling."""
    known = {_fold(spell(f.name, spelling)): f.name for f in _fields(cls)}
    values: dict[str, Any] = {}
    for written, value in given.items():
        name = known.get(_fold(str(written)))
        if name is None:
            raise OptionError(_unknown(cls, str(written), spelling))
        values[name] = value
    try:
        return cls(**values)
    except _BadValue as bad:
        raise OptionError(bad.explain(spell(bad.name, spelling))) from None


@dataclass(frozen=True)
class Source:
    """Option values from one place, by their Python names, and how that place spells and calls itself in errors."""

    spelling: Spelling
    values: Mapping[str, Any]
    where: str = ""


def build_from(cls: type[Options], sources: Iterable[Source]) -> Options:
    """Make the options from several places, of which the first that has a value wins; the error names its place."""
    known = {f.name for f in _fields(cls)}
    values: dict[str, Any] = {}
    origin: dict[str, Source] = {}
    for source in sources:
        for name, value in source.values.items():
            if name not in known:
                raise OptionError(_unknown(cls, name, source.spelling) + source.where)
            if name not in values:
                values[name], origin[name] = value, source
    try:
        return cls(**values)
    except _BadValue as bad:
        came = origin[bad.name]
        raise OptionError(bad.explain(spell(bad.name, came.spelling)) + came.where) from None


def check(options: Any) -> None:
    """Convert and check every field; called from ``__post_init__`` of each options class."""
    hints = _hints(type(options))
    for field in _fields(type(options)):
        rule: Rule = field.metadata["rule"]
        value = _convert(field.name, hints[field.name], rule, getattr(options, field.name))
        object.__setattr__(options, field.name, value)


def from_environment(cls: type[Options], environ: Mapping[str, str]) -> dict[str, str]:
    """The options of that role which the environment sets, under their Python names."""
    names = {spell(f.name, "env"): f.name for f in _fields(cls)}
    return {names[key]: value for key, value in environ.items() if key in names}


def table(cls: type[Any], spelling: Spelling = "python", skip: Collection[str] = ()) -> str:
    """The options as a Markdown table: README and docs are printed from here, and a test keeps them fresh."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for name, rule, _, value in described(cls, skip):
        default = f"`{plain_default(value, rule)}`".replace("``", "")
        choices = f" One of {', '.join(f'`{c}`' for c in rule.choices)}." if rule.choices else ""
        rows.append(f"| `{spell(name, spelling)}` | {default} | {rule.help}{choices} |")
    return "\n".join(rows)


def toml(cls: type[Any], skip: Collection[str] = ()) -> str:
    """The options as lines of TOML, each commented out and set to its default, with what it means above it."""
    blocks = []
    for name, rule, kind, default in described(cls, skip):
        choices = f" One of {', '.join(rule.choices)}." if rule.choices else ""
        about = textwrap.wrap(rule.help.replace("`", "") + choices, 116)
        value = "" if default is None else f" {_toml_value(default, rule, kind)}"
        blocks.append("\n".join([*(f"# {line}" for line in about), f"#{name} ={value}"]))
    return "\n\n".join(blocks)


def described(cls: type[Any], skip: Collection[str] = ()) -> Iterator[tuple[str, Rule, Any, Any]]:
    """Every option but those: its name, its rule, its type without None, and its default."""
    hints = _hints(cls)
    for field in _fields(cls):
        if field.name not in skip:
            kinds = [a for a in typing.get_args(hints[field.name]) if a is not type(None)] or [hints[field.name]]
            yield field.name, field.metadata["rule"], kinds[0], field.default


def _toml_value(default: Any, rule: Rule, kind: Any) -> str:
    return f'"{_plain(default, rule)}"' if kind is str or rule.duration else _plain(default, rule)


def plain_default(default: Any, rule: Rule) -> str:
    """A default for people: `24h` and not 86400000."""
    return "" if default in (None, "") else _plain(default, rule)


class _BadValue(OptionError):
    """A value that does not fit; ``build`` words it again in the user's spelling."""

    def __init__(self, name: str, expected: str, got: str) -> None:
        self.name, self.expected, self.got = name, expected, got
        super().__init__(self.explain(name))

    def explain(self, written: str) -> str:
        return f"{written} expects {self.expected}, got {self.got}"


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(cls) if "rule" in f.metadata]


def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fold(written: str) -> str:
    return written.strip().lower()


def _unknown(cls: Any, written: str, spelling: Spelling) -> str:
    names = [spell(f.name, spelling) for f in _fields(cls)]
    folded = {_fold(n): n for n in names}
    near = difflib.get_close_matches(_fold(written), folded, n=1, cutoff=0.5)
    hint = f"; did you mean {folded[near[0]]}?" if near else ""
    return f"unknown option {written!r:.80}{hint} Known: {', '.join(sorted(names))}"


def _convert(name: str, hint: Any, rule: Rule, value: Any) -> Any:
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    if value is None:
        if optional:
            return None
        raise _BadValue(name, _expectation(hint, rule), "None")
    kind = next(a for a in typing.get_args(hint) if a is not type(None)) if optional else hint
    converted = _CONVERTERS[kind](value) if not rule.duration else _duration(value)
    if converted is None or not _fits(converted, rule):
        raise _BadValue(name, _expectation(kind, rule, converted), _shown(value, rule))
    return converted


def _shown(value: Any, rule: Rule) -> str:
    if rule.secret:
        return "a value that is not shown because it is secret"
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"


def _fits(value: Any, rule: Rule) -> bool:
    if rule.choices is not None:
        return value in rule.choices
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (-MOST if rule.min is None else rule.min) <= value <= (MOST if rule.max is None else rule.max)
    return True


def _expectation(kind: Any, rule: Rule, value: Any = None) -> str:
    if rule.choices:
        return "one of " + ", ".join(rule.choices)
    if rule.duration:
        word = "milliseconds, a timedelta or text such as 500ms, 30s, 24h"
    else:
        word = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))
    most = MOST if rule.max is None and isinstance(value, int | float) and value > MOST else rule.max
    if rule.min is not None and most is not None:
        return f"{word} from {rule.min} to {most}"
    if rule.min is not None:
        return f"{word}, at least {rule.min}"
    return word if most is None else f"{word}, at most {most}"


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip(), re.ASCII):
        return int(value)
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _text(value: Any) -> str | None:
    """Text that can be sent: a lone surrogate has no UTF-8."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _boolean(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    return True if word in _TRUE else False if word in _FALSE else None


def _duration(value: Any) -> int | None:
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        return int(Decimal(match[1]) * _UNITS_MS[match[2] or "ms"]) if match else None
    return _integer(value)


def option_duration(written: str, value: str) -> int:
    """Milliseconds, for an argument that is no declared option; the error names it as it is written."""
    found = _duration(value)
    if found is None:
        raise _BadValue(written, _expectation(int, Rule("", duration=True)), f"{value!r:.80}")
    return found


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    int: _integer,
    float: _number,
    bool: _boolean,
    str: _text,
}


def _plain(value: Any, rule: Rule) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if rule.duration:
        for unit in ("d", "h", "m", "s"):
            if value and value % _UNITS_MS[unit] == 0:
                return f"{value // _UNITS_MS[unit]}{unit}"
        return f"{value}ms"
    return str(value)


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How to reach the server; part of every role's options."""

    url: str | None = option(
        None,
        secret=True,
        help="Where the server is: `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://` or "
        "`embedded://`. Without it `CHASQUI_URL`, then `redis://127.0.0.1:6379/0`.",
    )
    pool_size: int = option(8, min=1, max=10_000, help="Connections kept to the server.")
    connect_timeout_ms: int = option(10_000, min=1, max=DAY_MS, help="How long one attempt to connect may take.")
    socket_timeout_ms: int = option(30_000, min=1, max=DAY_MS, help="How long the server may take to answer a command.")
    reconnect_attempts: int = option(
        5, min=0, help="How often a lost connection is tried again before the call fails with ConnectionLost."
    )
    reconnect_initial_ms: int = option(
        100, min=1, max=DAY_MS, help="Wait before the first such try; it doubles from try to try, with jitter."
    )
    reconnect_max_ms: int = option(30_000, min=1, max=DAY_MS, help="The longest wait between two tries.")
    tls_ca: str | None = option(None, help="`rediss://`: file with the certificates to trust.")
    tls_cert: str | None = option(None, help="`rediss://`: our certificate file, when the server asks for one.")
    tls_key: str | None = option(None, secret=True, help="`rediss://`: file with the key of `tls_cert`.")
    sentinel_password: str | None = option(
        None, secret=True, help="`redis+sentinel://`: password of the sentinels themselves."
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ProducerOptions(ConnectionOptions):
    """Options of Producer and AsyncProducer."""

    queue: str = option("default", help="The queue's name.")
    raw: bool = option(False, help="Payloads and results are MessagePack bytes already: leave them alone.")
    datetimes: bool = option(
        False, help="Write datetime values as MessagePack timestamps, and read those back as aware UTC datetimes."
    )
    max_stream_len: int = option(1_000_000, min=1, help="How many jobs the stream may hold.")
    overflow: str = option(
        "reject",
        choices=("reject", "block", "trim"),
        help="What an add does at the cap: fail with QueueFull and add nothing, wait for `block_timeout` first, or do "
        "as ChasquiMQ does and drop the oldest waiting jobs. `reject` and `block` act at 0.9 of `max_stream_len`.",
    )
    block_timeout: int = option(
        30_000, min=0, duration=True, help="How long `overflow=block` waits for room before QueueFull."
    )
    max_delay_secs: int = option(
        30 * 24 * 3600, min=0, max=100 * _YEAR_SECS, help="Longest delay that is accepted, in seconds; 0 accepts any."
    )
    max_payload_bytes: int = option(
        1_048_576,
        min=1,
        max=512 * 1024 * 1024,
        help="Largest encoded job that is accepted; workers refuse larger ones as well.",
    )
    dedup_ttl: int = option(
        86_400_000,
        min=1000,
        duration=True,
        help="How long an id given by the caller is remembered: within it the same id is added once.",
    )


@dataclass(frozen=True, kw_only=True)
class RoleOptions(ConnectionOptions):
    """What the standing roles share: they wait out any outage, so their waits between tries stay short."""

    reconnect_max_ms: int = option(1_000, min=1, max=DAY_MS, help="The longest wait between two tries to reconnect.")
    queue: str = option("default", help="The queue's name.")


@dataclass(frozen=True, kw_only=True)
class LeaderOptions(RoleOptions):
    """What promoter and scheduler share: of all that run, one leads."""

    max_stream_len: int = option(1_000_000, min=1, help="How many jobs the stream may hold.")
    overflow: str = option(
        "reject",
        choices=("reject", "trim"),
        help="At the cap: leave what is due where it is until there is room, or trim the stream as ChasquiMQ does.",
    )
    dlq_max_stream_len: int = option(100_000, min=1, help="`MAXLEN ~` of the dead letters.")
    lock_ttl_secs: int = option(5, min=1, max=86_400, help="How long a leader that fell silent keeps its lease.")
    holder_id: str = option("", help="This instance's name in the lease; made up when empty.")


@dataclass(frozen=True, kw_only=True)
class PromoterOptions(LeaderOptions):
    """Options of Promoter."""

    poll_interval_ms: int = option(100, min=1, max=DAY_MS, help="How often to look for due jobs.")
    promote_batch: int = option(256, min=1, max=1000, help="Most jobs moved in one step.")
    events_enabled: bool = option(True, help="Write a `waiting` event for each promoted job.")
    events_max_stream_len: int = option(100_000, min=1, help="`MAXLEN ~` of the events.")


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(LeaderOptions):
    """Options of Scheduler."""

    tick_interval_ms: int = option(1_000, min=1, max=DAY_MS, help="How often to look for due specs.")
    batch: int = option(256, min=1, max=1000, help="Most specs handled in one tick.")


@dataclass(frozen=True, kw_only=True)
class Settling:
    """How outcomes of jobs are settled, by whoever works on them: part of every worker's options."""

    group: str = option("default", help="The consumer group: all workers of a queue share one.")
    claim_min_idle_ms: int = option(
        30_000, min=50, help="A job whose worker has not renewed its claim for so long is taken over."
    )
    max_attempts: int = option(3, min=0, max=2**32 - 1, help="Runs of a job before it is given up, the first included.")
    max_payload_bytes: int = option(
        1_048_576, min=1, max=512 * 1024 * 1024, help="Larger jobs go to the dead letters unread."
    )
    dlq_max_stream_len: int = option(100_000, min=1, help="`MAXLEN ~` of the dead letters.")
    retry_initial_backoff_ms: int = option(100, min=0, help="Wait before the first retry.")
    retry_max_backoff_ms: int = option(30_000, min=0, help="Longest wait before a retry, jitter not counted.")
    retry_multiplier: float = option(2.0, min=0, help="How much longer each next wait is.")
    retry_jitter_ms: int = option(100, min=0, help="Up to this much is added to each wait.")
    events_enabled: bool = option(True, help="Write what happens to jobs to the events stream.")
    events_max_stream_len: int = option(100_000, min=1, help="`MAXLEN ~` of the events.")
    store_results: bool = option(False, help="Store what handlers return, for `get_result`.")
    result_ttl_secs: int = option(3_600, min=1, max=10 * _YEAR_SECS, help="How long a result is kept.")


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions(Settling, RoleOptions):
    """Options of Consumer."""

    consumer_id: str = option(
        "",
        help="This worker's name in the group; `c-<uuid>` when empty. Two workers at a time must not share one: each "
        "would give the other's jobs back. Names in `spark-` belong to the Spark connector.",
    )
    raw: bool = option(False, help="Payloads and results are MessagePack bytes: leave them alone.")
    datetimes: bool = option(False, help="Read MessagePack timestamps as aware UTC datetimes, and write them so.")
    batch: int = option(64, min=1, max=10_000, help="Most jobs taken in one read.")
    block_ms: int = option(5_000, min=1, max=DAY_MS, help="How long a read waits for jobs.")
    concurrency: int = option(100, min=1, max=100_000, help="Most handlers at work at a time.")
    ack_batch: int = option(256, min=1, max=1000, help="Most jobs settled in one step.")
    ack_idle_ms: int = option(5, min=0, help="Longest wait of a finished job for others to be settled with.")
    shutdown_deadline_secs: int = option(
        30, min=0, max=86_400, help="How long running handlers may finish after a stop."
    )
    dlq_inflight: int = option(32, min=1, max=1000, help="Most dead letters moved in one step.")
    retry_inflight: int = option(64, min=1, max=1000, help="Most retries moved in one step.")
    delayed_enabled: bool = option(True, help="Run a promoter inside.")
    delayed_poll_interval_ms: int = option(100, min=1, max=DAY_MS, help="Its `poll_interval_ms`.")
    delayed_promote_batch: int = option(256, min=1, max=1000, help="Its `promote_batch`.")
    delayed_max_stream_len: int = option(1_000_000, min=1, help="Its `max_stream_len`.")
    delayed_lock_ttl_secs: int = option(5, min=1, max=86_400, help="Its `lock_ttl_secs`.")
    run_scheduler: bool = option(True, help="Run a scheduler inside.")
    scheduler_tick_interval_ms: int = option(1_000, min=1, max=DAY_MS, help="Its `tick_interval_ms`.")
    pause_poll_ms: int = option(250, min=1, max=DAY_MS, help="How often to look whether the queue is paused.")
    unknown_name: str = option(
        "fail", choices=("fail", "dlq"), help="A job whose name a Router does not know: a failed run, or a dead letter."
    )
