"""The proof: Spark killed at every step of a batch, and started again from its checkpoint. Each row once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from chasqui.embedded import EmbeddedServer
from tests.engine.seen import keys_of
from tests.proxy import Act, Proxy
from tests.spark.sink_process import start
from tests.spark.sink_tools import SparkProcess, add_rows, all_of, expected, kill_tree
from tests.support import eventually

# Two starts of Spark a test: seconds on a quiet machine, but not on one that is busy with other tests.
pytestmark = pytest.mark.timeout(400)

ROWS = 6000

# Where the batch is, by the command that it sends next, and by which of them. A commit calls scripts in this order:
# begin, adopt, decide, then publish until all is moved, close, retire, drop; then it asks for the disk. (Every single
# command of it is broken in tests/engine/test_transactions.py, without Spark.)
STEPS = {
    "before staging": ("HMGET", 1),
    "while staging": ("EXEC", 2),
    "after staging, before the manifest": ("EVALSHA", 1),
    "between two slices": ("EVALSHA", 6),
    "published, before Spark's commit file": ("WAITAOF", 1),
}


def killed(pid: Callable[[], int], *, forward: bool) -> Act:
    """The whole of Spark dies as the command comes: before it is carried out, or after."""
    fall = lambda: kill_tree(pid())  # noqa: E731
    return Act(after=fall, reply=False) if forward else Act(before=fall, forward=False)


@pytest.mark.parametrize("step", STEPS)
def test_spark_killed_at_any_step_and_restarted_enqueues_each_row_once(
    spark: SparkSession, server: EmbeddedServer, client: redis.Redis, queue: str, tmp_path: Path, step: str
) -> None:
    add_rows(tmp_path / "in", range(ROWS // 2))
    add_rows(tmp_path / "in", range(ROWS // 2, ROWS))
    about = {"folder": str(tmp_path / "in"), "checkpoint": str(tmp_path / "checkpoint"), "queue": queue}
    command, nth = STEPS[step]
    assert server.port is not None
    with Proxy(server.port) as proxy, SparkProcess(**about, url=proxy.url) as process:
        proxy.on(command, nth=nth, act=killed(lambda: process.pid, forward=step.startswith("between")))
        process.go()
        assert process.ended() is False
        assert proxy.counts[command] >= nth

    query = start(spark, {**about, "url": server.url})
    query.awaitTermination()  # type: ignore[attr-defined]

    assert all_of(server.url, queue) == expected(ROWS)
    stages = [key for key in keys_of(client, queue) if ":stage:" in key]
    assert not [key for key in stages if client.ttl(key) == -1]


def test_a_commit_that_outlives_its_killed_jvm_does_not_double_the_next_run(
    spark: SparkSession, server: EmbeddedServer, queue: str, tmp_path: Path
) -> None:
    """Only the JVM dies: the Python process that commits goes on by itself, beside the new driver."""
    add_rows(tmp_path / "in", range(ROWS))
    about = {"folder": str(tmp_path / "in"), "checkpoint": str(tmp_path / "checkpoint"), "queue": queue}
    assert server.port is not None
    with Proxy(server.port) as proxy, SparkProcess(**about, url=proxy.url) as process:
        proxy.on("EVALSHA", nth=5, act=Act(before=lambda: os.kill(process.pid, signal.SIGKILL)))
        process.go()
        eventually(lambda: proxy.counts["EVALSHA"] >= 5, within=200)
        query = start(spark, {**about, "url": server.url})
        query.awaitTermination()  # type: ignore[attr-defined]

    assert all_of(server.url, queue) == expected(ROWS)


def test_foreach_batch_killed_between_two_slices_enqueues_each_row_once(
    spark: SparkSession, server: EmbeddedServer, queue: str, tmp_path: Path
) -> None:
    add_rows(tmp_path / "in", range(ROWS))
    about = {"folder": str(tmp_path / "in"), "checkpoint": str(tmp_path / "checkpoint"), "queue": queue}
    about["sink"] = "foreachBatch"
    assert server.port is not None
    with Proxy(server.port) as proxy, SparkProcess(**about, url=proxy.url) as process:
        proxy.on("EVALSHA", nth=6, act=killed(lambda: process.pid, forward=True))
        process.go()
        assert process.ended() is False

    query = start(spark, {**about, "url": server.url})
    query.awaitTermination()  # type: ignore[attr-defined]

    assert all_of(server.url, queue) == expected(ROWS)
