"""What spark-submit programs share: options from flags, environment and file, and errors that fit on a line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.errors import AnalysisException, IllegalArgumentException, ParseException, PySparkException
from pyspark.logger import PySparkLogger

import chasqui
from chasqui import ChasquiError, ConfigError, ConnectionLost, PayloadError, QueueFull, RedisError
from chasqui.bridge import ConnectionOptions, Link, add_arguments, collect, option_duration, read_file, spell
from chasqui_spark.options import connection_of, server_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

C = TypeVar("C", bound=ConnectionOptions)

FAILED, MISTAKE, UNREACHABLE, REFUSED, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes, the same as those of ``chasquictl``."""

_OURS = re.compile(r"chasqui\.errors\.(\w+): (\[CMQ-\d{3}\] [^\n]*)")

_REMEMBERED = 1000


def arguments(about: str | None, cls: type[Any], *, skip: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """A parser with ``--config`` and a flag for every option of that role."""
    head, _, rest = (about or "").partition("\n")
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options, such as conf/chasqui.toml")
    add_arguments(parser.add_argument_group("options of the queue"), cls, skip=skip)
    return parser


def chosen(cls: type[C], flags: argparse.Namespace, table: str) -> C:
    """The role's options: flag, else environment, else the file's table, else its top level.

    The server is asked whether it is there and lets us in: sooner, and in fewer words, than Spark would tell.
    """
    path = os.environ.get("CHASQUI_CONFIG") if flags.config is None else flags.config
    options = collect(cls, flags, table=table, file=None if path is None else read_file(path))
    link = Link(replace(connection_of(options), url=server_of(options.url).url))
    try:
        link.ping()
    finally:
        link.close()
    return options


def session(name: str, settings: Mapping[str, str | int | float | bool | None] | None = None) -> SparkSession:
    """The Spark that runs the program. It is told of the format where it would not find it by itself, which looks for
    modules in its path: an editable install hides ours.
    """
    from pyspark.sql import SparkSession

    from chasqui_spark.datasource import register

    spark = SparkSession.builder.appName(name).config(map=dict(settings or {})).getOrCreate()
    if all(module.name != "pyspark_chasqui" for module in pkgutil.iter_modules([os.getcwd(), *sys.path])):
        register(spark)
    return spark


def interval(text: str) -> str:
    """A time such as `60s` or `5m` in Spark's words; what Spark itself understands stays."""
    try:
        return f"{option_duration('', text)} milliseconds"
    except ConfigError:
        return text


def trigger(follow: str | None) -> dict[str, Any]:
    """When batches are made: all that is there now and no more, or every so often."""
    return {"availableNow": True} if follow is None else {"processingTime": interval(follow)}


def spark_options(options: Any) -> dict[str, str]:
    """The options that differ from their defaults, as Spark takes them: for ``.options(**...)``."""
    return {spell(name, "spark"): _text(value) for name, value in python_options(options).items()}


def python_options(options: Any) -> dict[str, Any]:
    """The same as keyword arguments, for ``worker(...)``."""
    return {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}


class Counted:
    """How many rows a running query has read. Spark remembers its last hundred batches only: ask more often."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._seen: dict[int, int] = {}
        self._rows = 0

    def rows(self) -> int:
        """Rows of all batches since the query was started."""
        for progress in self._query.recentProgress:
            # While nothing comes Spark tells of the batch to come, with no rows.
            known = self._seen.get(progress.batchId, 0)
            self._rows += max(0, progress.numInputRows - known)
            self._seen[progress.batchId] = max(known, progress.numInputRows)
        for batch in sorted(self._seen)[:-_REMEMBERED]:
            del self._seen[batch]
        return self._rows

    def finish(self, every_s: int = 1, tell: Callable[[int], object] = lambda _: None) -> int:
        """Wait for the query's end; its rows. ``tell`` is told of them every so often."""
        while not self._query.awaitTermination(every_s):
            tell(self.rows())
        return self.rows()


def run(main: Callable[[list[str]], int]) -> None:
    """Run a program: its exit code is the answer. What a user can mend is one line, the last one; what nobody foresaw
    keeps its traceback.
    """
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)  # they say mistakes in JSON, with two stack traces
    # An interrupt ends the Java side as well, and a call under way tells of that with a traceback of its own.
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
        _stop_session()
    except Exception as error:
        found = verdict(error)
        _stop_session()
        if found is None:
            raise
        code = found[0]
        print(f"error: {found[1]}", file=sys.stderr)  # noqa: T201 (this is a program's last word)
    sys.exit(code)


def verdict(error: Exception) -> tuple[int, str] | None:
    """How a program ends with that error, and the line that says why; None for what was not foreseen. An error of ours
    that was raised in one of Spark's processes comes as the text of one of Spark's.
    """
    if isinstance(error, ChasquiError):
        return _code(type(error)), str(error)
    if not isinstance(error, PySparkException):
        return None
    text = str(error)
    if ours := _OURS.findall(text):
        name, said = ours[-1]
        return _code(getattr(chasqui, name, ChasquiError)), said
    if "Traceback" in text:
        return None
    asked_wrongly = (AnalysisException, ParseException, IllegalArgumentException)
    return MISTAKE if isinstance(error, asked_wrongly) else FAILED, text.strip().partition("\n")[0]


def _code(kind: type[Any]) -> int:
    if issubclass(kind, ConfigError | PayloadError):
        return MISTAKE
    if issubclass(kind, ConnectionLost):
        return UNREACHABLE
    return REFUSED if issubclass(kind, RedisError | QueueFull) else FAILED


def _stop_session() -> None:
    """What Spark says while it ends comes before the program's last line."""
    from pyspark.sql import SparkSession

    with contextlib.suppress(Exception):
        if session := SparkSession.getActiveSession():
            session.stop()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
