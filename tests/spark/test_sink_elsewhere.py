"""The sink where tasks fail and are run again, on a cluster of processes, and over Spark Connect."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import redis

from tests.engine.seen import in_stream, keys_of
from tests.spark.elsewhere import told
from tests.spark.sink_tools import add_rows

ROWS = 3000


def numbers(client: redis.Redis, queue: str) -> Counter[int]:
    return Counter(job.payload["n"] for job in in_stream(client, queue))


@pytest.mark.timeout(320)
@pytest.mark.parametrize("deployment", ["retries", "local-cluster", "connect"])
def test_each_row_is_there_once(
    deployment: str, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    add_rows(tmp_path / "in", range(ROWS))
    about = {"url": one_url, "queue": one_queue, "folder": str(tmp_path / "in"), "checkpoint": str(tmp_path / "c")}

    errors = told("sink_elsewhere.py", deployment, about, tmp_path)

    assert numbers(one_client, one_queue) == Counter(range(ROWS))
    assert numbers(one_client, f"{one_queue}-stream") == Counter(range(ROWS))
    assert errors["named"] == ""
    if deployment == "connect":
        # The query's id cannot be seen there: it says so, and falls back to nothing.
        assert "pass txn_app_id" in errors["unnamed"]
        assert numbers(one_client, f"{one_queue}-each") == Counter(range(ROWS))
    else:
        assert errors["unnamed"] == ""
        assert numbers(one_client, f"{one_queue}-each") == Counter([*range(ROWS), *range(ROWS)])
    stages = [
        key
        for queue in ("", "-stream", "-each")
        for key in keys_of(one_client, f"{one_queue}{queue}")
        if ":stage:" in key
    ]
    assert stages == []
