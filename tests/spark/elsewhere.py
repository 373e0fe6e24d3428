"""Runs a script in another deployment of Spark, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.spark.sink_tools import ROOT


def told(script: str, deployment: str, about: dict[str, Any], home: Path) -> Any:
    """What the script of that name beside this file says in its line ``TOLD <json>``, once it has ended well."""
    if deployment == "connect" and find_spec("grpc") is None:
        pytest.skip("Spark Connect needs grpcio: pip install 'pyspark[connect]'")
    ours = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), deployment, json.dumps(about)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=home,
        env={**os.environ, **ours, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD ")).removeprefix("TOLD "))
