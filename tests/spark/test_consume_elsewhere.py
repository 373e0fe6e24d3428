"""worker() on a cluster of processes, one of which is killed, and over Spark Connect."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.spark.consume_tools import add, pending, waiting
from tests.spark.elsewhere import told

JOBS = 40


@pytest.mark.timeout(320)
@pytest.mark.parametrize("deployment", ["local-cluster", "connect"])
def test_every_job_is_settled_by_itself(
    deployment: str, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    add(one_url, one_queue, JOBS)
    about = {"url": one_url, "queue": one_queue, "home": str(tmp_path)}

    rows = told("consume_elsewhere.py", deployment, about, tmp_path)

    # A row a job; those that the killed task had settled are not counted by the one in its place.
    assert JOBS - 10 <= rows <= JOBS
    assert (tmp_path / "killed").exists() == (deployment == "local-cluster")
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert set(seen) == set(range(JOBS))
    # Only jobs of the task that died may have been run twice: those it had done and not yet settled.
    doubled = {number for number in seen if seen.count(number) > 1}
    assert doubled <= set(range(10, 30)) if deployment == "local-cluster" else doubled == set()
    assert (waiting(one_client, one_queue), pending(one_client, one_queue)) == (0, {})
    assert one_client.xlen(f"{{chasqui:{one_queue}}}:dlq") == 1
    assert len(one_client.keys(f"{{chasqui:{one_queue}}}:result:*")) == JOBS - 1
