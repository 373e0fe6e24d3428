"""What spark-submit programs share: options from flags, environment and file, and errors that fit on a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from chasqui import ChasquiError
from chasqui.bridge import add_arguments, collect, read_file, spell

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

T = TypeVar("T")

_REMEMBERED = 1000


def arguments(about: str | None, cls: type[Any], *, skip: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """A parser with ``--config`` and a flag for every option of that role."""
    head, _, rest = (about or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options, such as conf/chasqui.toml")
    add_arguments(parser.add_argument_group("options of the queue"), cls, skip=skip)
    return parser


def chosen(cls: type[T], flags: argparse.Namespace, table: str) -> T:
    """The role's options: flag, else environment, else the file's table, else its top level."""
    return collect(cls, flags, table=table, file=read_file(flags.config) if flags.config else None)


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
    """Run a program: its exit code is the answer, and a user's mistake is one line with exit code 2."""
    try:
        code = main(sys.argv[1:])
    except ChasquiError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (this is a program's last word)
        code = 2
    sys.exit(code)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
