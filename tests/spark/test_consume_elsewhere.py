"""worker() on a cluster of processes, one of which is killed, and over Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

from tests.spark.consume_tools import add, pending, waiting
from tests.spark.sink_tools import ROOT

SCRIPT = str(Path(__file__).with_name("consume_elsewhere.py"))
JOBS = 40


@pytest.mark.timeout(320)
@pytest.mark.parametrize("deployment", ["local-cluster", "connect"])
def test_every_job_is_settled_by_itself(
    deployment: str, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    if deployment == "connect" and find_spec("grpc") is None:
        pytest.skip("Spark Connect needs grpcio: pip install 'pyspark[connect]'")
    add(one_url, one_queue, JOBS)
    about = {"url": one_url, "queue": one_queue, "home": str(tmp_path)}
    ours = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

    done = subprocess.run(
        [sys.executable, SCRIPT, deployment, json.dumps(about)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **ours, "PYTHONPATH": path},
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists() == (deployment == "local-cluster")
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert set(seen) == set(range(JOBS))
    # Only jobs of the task that died may have been run twice: those it had done and not yet settled.
    doubled = {number for number in seen if seen.count(number) > 1}
    assert doubled <= set(range(10, 30)) if deployment == "local-cluster" else doubled == set()
    assert (waiting(one_client, one_queue), pending(one_client, one_queue)) == (0, {})
    assert one_client.xlen(f"{{chasqui:{one_queue}}}:dlq") == 1
    assert len(one_client.keys(f"{{chasqui:{one_queue}}}:result:*")) == JOBS - 1
