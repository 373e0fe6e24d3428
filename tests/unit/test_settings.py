"""Options from flags, environment and file: which one counts, and how each speaks of its mistakes."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from chasqui.errors import ConfigError, OptionError
from chasqui.options import ConsumerOptions, ProducerOptions, PromoterOptions, SchedulerOptions, described, spell
from chasqui.settings import TABLES, add_arguments, collect, read_file
from chasqui_spark.options import ReplayOptions, SettleOptions, SinkOptions, SourceOptions
from docs import generate

CONF = Path(__file__).parents[2] / "conf"


def flags(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser, ConsumerOptions)
    return parser.parse_args(args)


def test_flag_wins_over_environment_over_table_over_top_over_default() -> None:
    file = {"pool_size": 2, "connect_timeout_ms": 2, "socket_timeout_ms": 2, "consumer": {"pool_size": 3, "batch": 3}}
    environ = {"CHASQUI_POOL_SIZE": "4", "CHASQUI_BATCH": "4", "CHASQUI_CONNECT_TIMEOUT_MS": "4"}

    options = collect(ConsumerOptions, flags("--pool-size", "5"), table="consumer", file=file, environ=environ)

    assert options.pool_size == 5
    assert options.batch == 4
    assert options.connect_timeout_ms == 4
    assert options.socket_timeout_ms == 2
    assert options.block_ms == ConsumerOptions().block_ms
    assert collect(ConsumerOptions, flags(), table="consumer", file=file, environ={}).pool_size == 3


def test_booleans_have_a_flag_for_each_side() -> None:
    assert collect(ConsumerOptions, flags("--store-results"), environ={}).store_results is True
    assert collect(ConsumerOptions, flags("--no-events-enabled"), environ={}).events_enabled is False


def test_durations_may_be_written_as_text_in_flags_and_file() -> None:
    assert collect(ProducerOptions, {"dedup_ttl": "2h"}, environ={}).dedup_ttl == 7_200_000
    assert collect(ProducerOptions, {}, table="producer", file={"producer": {"dedup_ttl": "2h"}}, environ={}).dedup_ttl


@pytest.mark.parametrize(
    ("given", "environ", "file", "words"),
    [
        ({"batch": "x"}, {}, None, r"^\[CMQ-004\] --batch expects a whole number"),
        ({}, {"CHASQUI_BATCH": "x"}, None, r"CHASQUI_BATCH expects .* in the environment$"),
        ({}, {}, {"consumer": {"batch": "x"}}, r"\bbatch expects .* in the table \[consumer\] of the file$"),
        ({}, {}, {"consumer": {"bach": 1}}, r"unknown option 'bach'; did you mean batch\?"),
        ({}, {}, {"pool_size": 0}, r"pool_size expects .* in the file$"),
    ],
)
def test_mistake_is_named_as_it_was_written(
    given: dict[str, str], environ: dict[str, str], file: dict[str, object] | None, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        collect(ConsumerOptions, given, table="consumer", file=file, environ=environ)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"CHASQUI_BACH": "3"}, "CHASQUI_BACH in the environment is read by nobody; did you mean CHASQUI_BATCH?"),
        ({"CHASQUI_CONFG": "f"}, "did you mean CHASQUI_CONFIG?"),
        ({"CHASQUI_URL": ""}, "CHASQUI_URL is empty in the environment: give it a value, or unset it"),
        ({"CHASQUI_BATCH": " "}, "CHASQUI_BATCH is empty"),
    ],
)
def test_variable_that_is_a_slip_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        collect(ConsumerOptions, {}, environ=environ)


@pytest.mark.parametrize("cls", [ProducerOptions, ConsumerOptions, SourceOptions, SinkOptions, ReplayOptions])
def test_variables_of_other_roles_and_of_others_are_let_through(cls: type[Any]) -> None:
    roles = (ProducerOptions, ConsumerOptions, PromoterOptions, SchedulerOptions)
    others = {
        name
        for role in (*roles, SourceOptions, SinkOptions, SettleOptions, ReplayOptions)
        for name, *_ in described(role)
    }
    mine = {name for name, *_ in described(cls)}
    environ = {spell(name, "env"): "x" for name in others - mine}

    collect(cls, {"queue": "q"}, environ=environ | {"CHASQUI_CONSUMER_ID": "", "CHASQUI_TEST_SERVERS": "", "PATH": ""})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[consmer]\nbatch = 1", "unknown table 'consmer'; did you mean consumer?"),
        ("[consumer]\nbach = 1", "table [consumer]: unknown option 'bach'; did you mean batch?"),
        ("pol_size = 1", "unknown option 'pol_size'; did you mean pool_size?"),
        ("url = ", "is not TOML"),
        ("\xff", "is not TOML"),
        ("# " + "x" * (1 << 20), "longer than 1048576 bytes"),
    ],
)
def test_file_that_would_not_be_heeded_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "chasqui.toml"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=re.escape(words)):
        read_file(path)


def test_secret_is_not_told_with_the_mistake() -> None:
    with pytest.raises(OptionError) as error:
        collect(ProducerOptions, {"url": 5}, environ={})

    assert "secret" in str(error.value)


def uncommented() -> str:
    lines = (CONF / "chasqui.toml").read_text().splitlines()
    return "\n".join(line[1:] if re.match(r"#\w+ = \S", line) else line for line in lines)


def test_the_shipped_file_is_that_of_the_declarations() -> None:
    assert (CONF / "chasqui.toml").read_text() == generate.conf_text(), "stale: run make docs"


def test_the_shipped_file_changes_nothing_as_it_is() -> None:
    assert read_file(CONF / "chasqui.toml") == {table: {} for table in TABLES}


@pytest.mark.parametrize(
    ("table", "cls"),
    [
        ("producer", ProducerOptions),
        ("consumer", ConsumerOptions),
        ("promoter", PromoterOptions),
        ("scheduler", SchedulerOptions),
    ],
)
def test_the_shipped_file_uncommented_says_the_defaults(table: str, cls: type) -> None:
    file = tomllib.loads(uncommented())
    own = {table: file[table]}

    assert collect(cls, {}, table=table, file=own, environ={}) == cls()
    named = set(file) | set(file[table]) | set(re.findall(r"^#(\w+) =$", uncommented(), re.M))
    assert {name for name, *_ in described(cls)} <= named
