"""The help teaches: every command has examples, and every example is one that the program takes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

import pytest

from chasqui.cli.program import EPILOG, main, parser


def commands(
    found: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that does something, by the words that call it."""
    for action in found._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from commands(inner, (*path, name))
            return
    yield " ".join(path), found


COMMANDS = dict(commands(parser()))


def examples(text: str) -> list[list[str]]:
    """The arguments of each call of chasquictl in a text: without what stands before a pipe, or after one."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line, comments=False)
        if "chasquictl" in words:
            rest = words[words.index("chasquictl") + 1 :]
            ends = [rest.index(word) for word in ("|", ">", "&") if word in rest]
            found.append(rest[: min(ends, default=len(rest))])
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_examples_that_it_takes(name: str) -> None:
    shown = examples(COMMANDS[name].epilog or "")

    assert shown
    for args in shown:
        taken = parser().parse_args(args)
        assert " ".join(args).startswith(name)
        assert callable(taken.run)


def test_examples_of_the_program_are_taken() -> None:
    shown = [line.split("  ")[1] for line in EPILOG.splitlines() if line.startswith("  chasquictl")]

    assert len(shown) == 5
    for args in examples("\n".join(shown)):
        assert callable(parser().parse_args(args).run)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_write_json_and_names_the_server_the_same_way(name: str) -> None:
    flags = {flag for action in COMMANDS[name]._actions for flag in action.option_strings}

    assert {"--json", "--url", "--config", "--tls-ca"} <= flags


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_can_be_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parser().parse_args([*name.split(), "--help"])

    assert stop.value.code == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["inspct", "q"], ["usage: chasquictl [options] COMMAND ...", "did you mean inspect?"]),
        (["dlq", "peak", "q"], ["usage: chasquictl dlq [options] COMMAND ...", "did you mean peek?"]),
        (["inspect", "q", "--jsn"], ["unknown argument '--jsn'; did you mean --json?"]),
        (["inspect", "q", "r"], ["unknown argument 'r'"]),
        (["inspect"], ["usage: chasquictl inspect [options] QUEUE", "QUEUE"]),
        (["repeatable", "upsert", "q", "n"], ["(--cron EXPRESSION | --every TIME)"]),
    ],
)
def test_a_slip_in_the_arguments_is_told_in_two_lines_and_what_was_meant(
    args: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2

    err = capsys.readouterr().err
    assert all(words in err for words in said), err
    assert len(err.splitlines()) <= 4


def test_debug_may_stand_before_and_after_the_command() -> None:
    assert [parser().parse_args(a.split()).debug for a in ("inspect q", "--debug inspect q", "inspect q --debug")] == [
        False,
        True,
        True,
    ]
