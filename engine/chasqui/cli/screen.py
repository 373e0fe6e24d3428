"""Where output goes. Results on stdout, everything that accompanies them (questions, progress, warnings) on stderr.

On a terminal tables are drawn by rich. Anywhere else the same rows come as plain aligned text, uncut and without
colour, the same every time; with ``--json`` as JSON. rich is loaded only when a terminal asks for it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from chasqui.cli.shown import as_json, printable

if TYPE_CHECKING:
    from rich.console import Console

Row = Sequence[str]


class OutputLost(Exception):
    """A result cannot be written: the disk is full, say. A reader that went away is a BrokenPipeError."""


def prepare_streams() -> None:
    """Streams that the caller has closed are empty and swallow everything, and no character that a server holds can
    end a command because the terminal has no sign for it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the program runs)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Nothing more is written: what is still held for stdout would fail again when the program ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Screen:
    """The two streams of a command, and how it was asked to write."""

    def __init__(self, *, as_json: bool = False, out: IO[str] | None = None, err: IO[str] | None = None) -> None:
        self.json = as_json
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._console: Console | None = None

    @property
    def live(self) -> bool:
        """Whether somebody looks on: then views may be redrawn in place."""
        return not self.json and self._out.isatty()

    @property
    def console(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self._out, highlight=False)
        return self._console

    def document(self, value: Any) -> None:
        """The result of a command that was asked for JSON: one line."""
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        self._write(as_json(value, ascii=not encoding.lower().startswith("utf")))

    def line(self, text: str) -> None:
        """A line of the result."""
        self._write(printable(text))

    def say(self, text: str) -> None:
        """A line beside the result."""
        with contextlib.suppress(OSError):
            print(printable(text), file=self._err, flush=True)

    def _write(self, text: str) -> None:
        try:
            print(text, file=self._out, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(f"the output cannot be written: {error.strerror or error}") from error

    def table(
        self, heads: Row, rows: Sequence[Row], *, numbers: Sequence[str] = (), folded: Sequence[str] = ()
    ) -> None:
        """A table; columns named in ``numbers`` stand to the right, and those in ``folded`` give way on a terminal."""
        clean = [[printable(cell) for cell in row] for row in rows]
        if self.live:
            self.console.print(_drawn(heads, clean, numbers, folded))
            return
        right = {i for i, head in enumerate(heads) if head in numbers}
        widths = [max(map(len, column)) for column in zip(heads, *clean, strict=True)]
        lines = []
        for row in [heads, *clean]:
            cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        self._write("\n".join(lines))

    def confirm(self, question: str, *, yes: bool) -> bool:
        """Ask on stderr; without a terminal to ask on nothing is agreed to."""
        if yes:
            return True
        if not sys.stdin.isatty():
            self.say(f"{question} There is no terminal to answer on: give --yes.")
            return False
        print(f"{printable(question)} [y/N] ", end="", file=self._err, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    @contextlib.contextmanager
    def accounting(self, so_far: Callable[[], str]) -> Iterator[None]:
        """What is cut short, by Ctrl-C or by the server, still says how far it came; `""` where that is nowhere."""
        try:
            yield
        except BaseException:
            if text := so_far():
                self.say(text)
            raise

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar on stderr while something long goes on, where stderr is a terminal; gives the call that moves it."""
        if not self._err.isatty():
            yield lambda _: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(file=self._err), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.advance(task, done)


def _drawn(heads: Row, rows: Sequence[Row], numbers: Sequence[str], folded: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    for head in heads:
        side, stays = "right" if head in numbers else "left", head not in folded
        least = None if stays else 8
        table.add_column(Text(head), justify=side, no_wrap=stays, min_width=least, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(Text, row))
    if not rows:
        table.add_row(Text("(empty)", style="dim"))
    return table
