"""Options from where operators write them: flags, the environment, a TOML file. In this order; the first wins.

The file is one for all programs. Its top level says how to reach the server; a table per role says the rest:

    url = "rediss://queue.example.org/0"

    [consumer]
    concurrency = 20
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from chasqui.errors import ConfigError, OptionError
from chasqui.options import (
    ConnectionOptions,
    ConsumerOptions,
    ProducerOptions,
    PromoterOptions,
    SchedulerOptions,
    Source,
    build_from,
    described,
    from_environment,
    plain_default,
    spell,
)

Options = TypeVar("Options")

ROLES = {
    "producer": ProducerOptions,
    "consumer": ConsumerOptions,
    "promoter": PromoterOptions,
    "scheduler": SchedulerOptions,
}
# Every role that reads a table of the file; the last ones are the Spark connector's, which knows their options.
TABLES = (*ROLES, "source", "sink", "replay")
# Options of the Spark connector that would pass for a slip of the engine's.
_CONNECTORS = ("queues", "consumer")
MAX_FILE_BYTES = 1 << 20


def add_arguments(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, cls: type[Any], *, skip: Collection[str] = ()
) -> None:
    """Give a parser a flag for every option but those. Their values stay as written: ``collect`` converts them."""
    for name, rule, kind, default in described(cls, skip):
        shown = plain_default(default, rule)
        text = rule.help.replace("`", "") + (f" (default: {shown})" if shown else "")
        flag: dict[str, Any] = {"dest": name, "default": None, "help": text.replace("%", "%%")}
        if kind is bool:
            parser.add_argument(spell(name, "cli"), action=argparse.BooleanOptionalAction, **flag)
        else:
            choices = "{" + ",".join(rule.choices) + "}" if rule.choices else None
            unit = "TIME" if rule.duration else {int: "N", float: "X"}.get(kind, "TEXT")
            parser.add_argument(spell(name, "cli"), metavar=choices or unit, **flag)


def collect(
    cls: type[Options],
    flags: argparse.Namespace | Mapping[str, Any],
    *,
    table: str = "",
    file: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Options:
    """The options of a role: flag, else environment, else its table of the file, else the file's top level."""
    names = {name for name, *_ in described(cls)}
    given = vars(flags) if isinstance(flags, argparse.Namespace) else flags
    environ = os.environ if environ is None else environ
    _refuse_slips(cls, environ)
    env = from_environment(cls, environ)
    sources = [
        Source("cli", {n: v for n, v in given.items() if n in names and v is not None}),
        Source("env", env, " in the environment"),
    ]
    if file is not None:
        if table:
            sources.append(Source("toml", file.get(table, {}), f" in the table [{table}] of the file"))
        top = {name: value for name, value in file.items() if not isinstance(value, dict) and name in names}
        sources.append(Source("toml", top, " in the file"))
    return build_from(cls, sources)


def _refuse_slips(cls: type[Any], environ: Mapping[str, str]) -> None:
    """A variable that is empty, or that nobody reads though its name is nearly one that somebody does."""
    known = {name for role in (cls, *ROLES.values()) for name, *_ in described(role)} | {"config"}
    filled = {name for name, _, _, default in described(cls) if default != ""}
    for variable, value in environ.items():
        name = variable.removeprefix("CHASQUI_").lower()
        if variable != spell(name, "env"):
            continue
        if name in filled and not value.strip():
            raise OptionError(f"{variable} is empty in the environment: give it a value, or unset it")
        if name in known or name in _CONNECTORS:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise OptionError(
                f"{variable} in the environment is read by nobody; did you mean {spell(near[0], 'env')}? "
                "Unset the one that is wrong"
            )


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The TOML file, with names that nobody would read refused: a misspelled one must not go unnoticed."""
    if not os.fspath(path):
        raise ConfigError("--config and CHASQUI_CONFIG expect the name of a TOML file, got ''; leave it out for none")
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES} bytes: that is no file of options")
        found = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"the file of options {path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    top = [name for name, *_ in described(ConnectionOptions)]
    for name, value in found.items():
        if isinstance(value, dict):
            _refuse_unknown(path, "table", [name], TABLES)
            if role := ROLES.get(name):
                _refuse_unknown(f"{path}, table [{name}]", "option", value, [option for option, *_ in described(role)])
        else:
            _refuse_unknown(path, "option", [name], top)
    return found


def _refuse_unknown(where: object, what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise OptionError(f"{where}: unknown {what} {name!r:.80}{hint} Known: {', '.join(known)}")
