"""The original's wheel in an interpreter of its own, and the only server that it runs on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from chasqui import Producer
from chasqui.embedded import EmbeddedServer, start
from tests.conftest import server_binaries
from tests.spark.conftest import spark  # noqa: F401 (the same session for mixed fleets with Spark)
from tests.support import eventually

SCRIPT = str(Path(__file__).with_name("native_worker.py"))


@pytest.fixture(scope="session")
def native_python() -> str:
    found = shutil.which(os.environ.get("CHASQUI_NATIVE_PYTHON", ""))
    if not found:
        pytest.skip("CHASQUI_NATIVE_PYTHON names no interpreter with the wheel chasquimq")
    if subprocess.run([found, "-c", "import chasquimq"], capture_output=True, check=False).returncode:
        pytest.skip(f"{found} cannot import chasquimq")
    return found


def knows_xackdel(client: redis.Redis) -> bool:
    try:
        client.execute_command("XACKDEL", "nowhere", "group", "IDS", 1, "1-1")
    except redis.ResponseError as error:
        return "unknown command" not in str(error)
    return True


@pytest.fixture(scope="session")
def native_server() -> Iterator[EmbeddedServer]:
    for binary in server_binaries().values():
        with start(binary=binary) as server, redis.Redis.from_url(server.url) as client:
            if knows_xackdel(client):
                yield server
                return
    pytest.skip(
        "no server among CHASQUI_TEST_SERVERS knows XACKDEL, and the wheel runs on no other (Redis 8.6 or newer)"
    )


@pytest.fixture
def url(native_server: EmbeddedServer) -> str:
    return native_server.url


@pytest.fixture
def producer(url: str, queue: str) -> Iterator[Producer]:
    with Producer(url, queue=queue) as ours:
        yield ours


class NativeWorker:
    """A worker process of the original. ``runs``: what each run of its handler has told, in order."""

    def __init__(self, python: str, url: str, queue: str, options: dict[str, Any]) -> None:
        self.runs: list[dict[str, Any]] = []
        self._told = threading.Event()
        self._process = subprocess.Popen(
            [python, SCRIPT, "work", url, queue, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._told.wait(20):
            self.close()
            raise AssertionError("the native worker did not start")

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            told = json.loads(line)
            if "ready" in told:
                self._told.set()
            else:
                self.runs.append(told)

    def wait_for_runs(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many runs have been told, and return them."""
        eventually(lambda: len(self.runs) >= count, within=20)
        return self.runs[:count]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        assert self._process.stdout
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def native_worker(native_python: str, url: str, queue: str) -> Iterator[Callable[..., NativeWorker]]:
    """Starts a worker of the original on the test's queue, with those options; ended when the test ends."""
    with ExitStack() as started:

        def start_worker(**options: Any) -> NativeWorker:
            settings = {"read_block_ms": 50, "run_scheduler": False, **options}
            return started.enter_context(NativeWorker(native_python, url, queue, settings))

        yield start_worker


@pytest.fixture
def native_queue(native_python: str, url: str, queue: str) -> Callable[..., list[Any]]:
    """Makes calls on one Queue of the original, each a method with its arguments; returns their answers."""

    def run(*calls: tuple[str, list[Any], dict[str, Any]]) -> list[Any]:
        done = subprocess.run(
            [native_python, SCRIPT, "call", url, queue, json.dumps(calls)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["answer"] for line in done.stdout.splitlines()]

    return run
