"""How pipelines of jobs/ end before Spark starts: mistakes, outages and refusals, each one line and an exit code."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chasqui import embedded
from chasqui_spark.pipeline import MISTAKE, REFUSED, UNREACHABLE, run

JOBS = Path(__file__).parents[2] / "jobs"
NEEDED = {
    "archive_events": ["--queue", "q", "--path", "p", "--checkpoint", "c"],
    "dlq_triage": ["--queue", "q"],
    "drain_queue": ["--queue", "q", "--handler", "json:dumps"],
    "enqueue_files": ["--queue", "q", "--input", "i"],
    "queue_slo": ["--queue", "q"],
}

End = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def one_url() -> Iterator[str]:
    with embedded.start() as server:
        yield server.url


@pytest.fixture
def end(one_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> End:
    """Run a pipeline; its exit code and what it said."""

    def call(name: str, *arguments: str, url: str = one_url) -> tuple[int, str]:
        monkeypatch.setenv("CHASQUI_URL", url)
        monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
        spec = importlib.util.spec_from_file_location(name, JOBS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with pytest.raises(SystemExit) as stop:
            run(module.main)
        out, err = capsys.readouterr()
        assert out == ""
        assert isinstance(stop.value.code, int)
        return stop.value.code, err

    return call


@pytest.mark.parametrize("name", NEEDED)
def test_a_server_that_is_not_there_ends_with_three(end: End, name: str) -> None:
    code, said = end(name, *NEEDED[name], "--reconnect-attempts", "0", url="redis://me:s3cret@127.0.0.1:1/0")

    assert code == UNREACHABLE
    assert said.startswith("error: [CMQ-001] redis://127.0.0.1:1 cannot be reached")
    assert len(said.splitlines()) == 1
    assert "s3cret" not in said


@pytest.mark.parametrize("name", NEEDED)
def test_a_server_that_does_not_let_us_in_ends_with_four(end: End, one_url: str, name: str) -> None:
    code, said = end(name, *NEEDED[name], url=one_url.replace("redis://", "redis://me:s3cret@"))

    assert code == REFUSED
    assert "refuses the user or password of the url" in said
    assert len(said.splitlines()) == 1
    assert "s3cret" not in said


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("archive_events", ["--queues", "a"], "exactly one of queue, queues and queuePattern is expected"),
        ("archive_events", ["--pool-size", "0"], "--pool-size expects a whole number"),
        ("archive_events", ["--config", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        ("archive_events", ["--url", "embedded://"], "start one in your program"),
        ("dlq_triage", ["--max-per-second", "5"], "--max-per-second is heeded with --replay only"),
        ("dlq_triage", ["--repair", "payload"], "--repair is heeded with --replay only"),
        ("dlq_triage", ["--replay", "--max-per-second", "0"], "--max-per-second expects a whole number, at least 1"),
        ("drain_queue", ["--handler", "nowhere:f"], "there is no module 'nowhere'"),
        ("drain_queue", ["--starting-offsets", "latest"], "unrecognized arguments: --starting-offsets"),
        ("enqueue_files", ["--stream"], "--stream and --checkpoint, a folder of its own, go together"),
        ("enqueue_files", ["--checkpoint", "c"], "--stream and --checkpoint, a folder of its own, go together"),
        ("enqueue_files", ["--txn-version", "1"], "txnVersion is counted per txnAppId"),
        ("queue_slo", ["--follow", "60s"], "--follow needs --path"),
        ("queue_slo", ["--path", "p"], "--path is heeded with --follow only"),
        ("queue_slo", ["--lateness", "5s"], "--lateness is heeded with --follow only"),
        ("queue_slo", ["--max-p99-ms", "0"], "--max-p99-ms expects milliseconds, more than 0; got 0"),
        ("queue_slo", ["--max-p99-ms", "nan"], "--max-p99-ms expects milliseconds, more than 0; got nan"),
        ("queue_slo", ["--max-failures", "1.5"], "--max-failures expects a share from 0 to 1"),
        (
            "queue_slo",
            ["--follow", "1s", "--path", "p", "--checkpoint", "c", "--max-failures", "0"],
            "--max-failures is heeded without --follow only",
        ),
    ],
)
def test_a_mistake_ends_with_two_and_says_what_it_is(end: End, name: str, more: list[str], words: str) -> None:
    code, said = end(name, *NEEDED[name], *more)

    assert code == MISTAKE
    assert words in said
    assert len(said.splitlines()) <= 2


def test_the_file_may_be_named_by_the_environment(end: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chasqui.toml"
    file.write_text("[source]\nlease_ttl = 'soon'\n")
    monkeypatch.setenv("CHASQUI_CONFIG", str(file))

    code, said = end("drain_queue", *NEEDED["drain_queue"])

    assert code == MISTAKE
    assert "lease_ttl expects" in said
    assert "in the table [source] of the file" in said
