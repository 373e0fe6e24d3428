"""What Spark's sink writes, worked on by the original's worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from tests.engine.seen import key
from tests.interop.conftest import NativeWorker
from tests.spark.conftest import spark
from tests.support import eventually

__all__ = ["spark"]


@pytest.mark.parametrize("numbered", [False, True], ids=["at-least-once", "exactly-once"])
def test_a_native_worker_processes_what_the_sink_wrote(
    spark: SparkSession,
    native_worker: Callable[..., NativeWorker],
    url: str,
    client: redis.Redis,
    queue: str,
    tmp_path: Path,
    numbered: bool,
) -> None:
    """Names, payloads, retry overrides, delays and ids; a failing job is retried by its own override."""
    rows = spark.sql(
        """select concat('job-', id) as id, if(id = 7, null, concat('name-', id % 3)) as name,
                  named_struct('n', id, 'text', 'käse', 'fail_until', if(id = 5, 1, 0)) as payload,
                  if(id % 4 = 0, 200L, 0L) as delay_ms,
                  if(id = 5, 2, null) as max_attempts,
                  if(id = 5, 'fixed', null) as backoff_kind, if(id = 5, 10L, null) as backoff_delay_ms
           from range(40)"""
    )
    writer = rows.write.format("chasqui").mode("append").option("url", url).option("queue", queue)
    if numbered:
        writer = writer.option("txnAppId", queue).option("txnVersion", 1)
    writer.save()

    worker = native_worker()
    runs: list[dict[str, Any]] = worker.wait_for_runs(41)

    assert Counter(run["data"]["n"] for run in runs) == Counter([*range(40), 5])
    for run in runs:
        n = run["data"]["n"]
        assert run["id"] == f"job-{n}"
        assert run["name"] == ("" if n == 7 else f"name-{n % 3}")
        assert run["data"]["text"] == "käse"
    assert [run["attempt"] for run in runs if run["data"]["n"] == 5] == [0, 1]
    eventually(lambda: client.xlen(key(queue, "stream")) == 0)
    assert client.xlen(key(queue, "dlq")) == 0
