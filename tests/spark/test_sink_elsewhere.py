"""The sink where tasks fail and are run again, on a cluster of processes, and over Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis

from tests.engine.seen import in_stream, keys_of
from tests.spark.sink_tools import ROOT, add_rows

SCRIPT = str(Path(__file__).with_name("sink_elsewhere.py"))
ROWS = 3000


def numbers(client: redis.Redis, queue: str) -> Counter[int]:
    return Counter(job.payload["n"] for job in in_stream(client, queue))


@pytest.mark.timeout(320)
@pytest.mark.parametrize("deployment", ["retries", "local-cluster", "connect"])
def test_each_row_is_there_once(
    deployment: str, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    if deployment == "connect" and find_spec("grpc") is None:
        pytest.skip("Spark Connect needs grpcio: pip install 'pyspark[connect]'")
    add_rows(tmp_path / "in", range(ROWS))
    about = {"url": one_url, "queue": one_queue, "folder": str(tmp_path / "in"), "checkpoint": str(tmp_path / "c")}
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
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD ")).removeprefix("TOLD "))
    assert numbers(one_client, one_queue) == Counter(range(ROWS))
    assert numbers(one_client, f"{one_queue}-stream") == Counter(range(ROWS))
    assert told["named"] == ""
    if deployment == "connect":
        # The query's id cannot be seen there: it says so, and falls back to nothing.
        assert "pass txn_app_id" in told["unnamed"]
        assert numbers(one_client, f"{one_queue}-each") == Counter(range(ROWS))
    else:
        assert told["unnamed"] == ""
        assert numbers(one_client, f"{one_queue}-each") == Counter([*range(ROWS), *range(ROWS)])
    stages = [
        key
        for queue in ("", "-stream", "-each")
        for key in keys_of(one_client, f"{one_queue}{queue}")
        if ":stage:" in key
    ]
    assert stages == []
