"""What spark-submit programs share: options from flags, environment and file, and errors that fit on a line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from chasqui import ChasquiError
from chasqui.bridge import add_arguments, collect, read_file, spell

T = TypeVar("T")


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
