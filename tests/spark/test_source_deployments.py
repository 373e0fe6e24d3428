"""The same source over Spark Connect, on separate executor processes, and with a driver that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.source_tools import add

SCRIPT = Path(__file__).with_name("source_process.py")
LIMIT_S = 110


def start(what: str, url: str, queue: str, checkpoint: Path) -> subprocess.Popen[str]:
    """In a process group of its own, which holds its JVM too."""
    env = os.environ | {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), what, url, queue, str(checkpoint)],
        # An editable install hides top-level modules from Spark's search; a real one does not.
        env=env | {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(SCRIPT.parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def result(process: subprocess.Popen[str]) -> Any:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("deployment", ["connect", "cluster"])
def test_batch_and_stream_read_everything(deployment: str, one_url: str, one_queue: str, tmp_path: Path) -> None:
    add(one_url, one_queue, *({"n": i} for i in range(40)))

    found = result(start(deployment, one_url, one_queue, tmp_path))

    assert found["batch"] == found["stream"] == list(range(40))
    figures = found["figures"]
    figures = json.loads(figures) if isinstance(figures, str) else figures
    assert figures["queues"][one_queue]["depth"] == 40


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_a_driver_killed_in_its_first_batch_skips_nothing_that_came_after_its_start(
    one_url: str, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, {"n": -1})
    process = start("hang", one_url, one_queue, tmp_path)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"batch": 0}
        add(one_url, one_queue, *({"n": i} for i in range(5)))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    assert result(start("run", one_url, one_queue, tmp_path)) == {"seen": [0, 1, 2, 3, 4]}
    add(one_url, one_queue, {"n": 5})
    process = start("hang", one_url, one_queue, tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert result(start("run", one_url, one_queue, tmp_path)) == {"seen": [5]}
