"""Drivers killed at every step, with everything they started: no job is lost, and doubles only where nobody could
know.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from chasqui.embedded import EmbeddedServer
from chasqui.protocol.scripts import script
from tests.proxy import Act, Proxy
from tests.spark.consume_tools import Seen, add, consume, drained, driver, pending, processed, waiting
from tests.support import eventually

pytestmark = pytest.mark.timeout(300)  # each starts a driver of its own, also on a machine that is busy
JOBS = 30
BATCH = "10"

# Where it dies, the script at which it does, whether before or after the server has carried it out, and whether the
# batch in hand may be run twice: only if its rows were out, and Spark had not committed.
STEPS = {
    "after the claim, before Spark's log": ("", "seal_batch", True, False),
    "mid-batch": ("mid-batch", "", False, True),
    "after the sink, before Spark's commit": ("before-commit", "", False, True),
    "after the commit, before settling": ("", "settle_batch", False, False),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_driver_loses_nothing(
    spark: SparkSession, server: EmbeddedServer, client: redis.Redis, queue: str, tmp_path: Path, step: str
) -> None:
    die, name, carried_out, may_double = STEPS[step]
    add(server.url, queue, JOBS)
    with (
        Proxy(int(server.port or 0)) as proxy,
        driver(proxy.url, queue, tmp_path, die, maxJobsPerTrigger=BATCH) as process,
    ):
        if name:

            def kill() -> None:
                os.killpg(process.pid, signal.SIGKILL)

            act = Act(after=kill, reply=False) if carried_out else Act(before=kill, forward=False)
            proxy.on("EVALSHA", having=script(name).sha, nth=2 if carried_out else 1, act=act)
        assert process.wait(90) == -signal.SIGKILL, (tmp_path / "driver.log").read_text()[-2000:]
    assert waiting(client, queue) > 0

    again = Seen()
    drained(consume(spark, server.url, queue, maxJobsPerTrigger=BATCH), tmp_path / "checkpoint", again)

    before = processed(tmp_path)
    assert len({*before, *again.ids}) == JOBS
    doubled = {entry for entry in again.ids if entry in before}
    assert again.doubled == []
    assert bool(doubled) == may_double
    assert len(doubled) <= int(BATCH)
    assert waiting(client, queue) == 0
    assert pending(client, queue) == {}


def test_the_jvm_alone_is_killed_and_its_successor_need_not_wait_for_the_lease(
    spark: SparkSession, one_url: str, one_client: redis.Redis, one_queue: str, tmp_path: Path
) -> None:
    """The source's process notices that Spark is gone and gives the lease back."""
    add(one_url, one_queue, 5)
    with driver(one_url, one_queue, tmp_path, leaseTtl="600s") as process:
        eventually(lambda: len(processed(tmp_path)) == 5, within=90)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

        def free() -> bool:
            (session,) = one_client.keys(f"{{chasqui:{one_queue}}}:spark:*:session")
            return one_client.hget(session, "until") == b"0"

        eventually(free, within=20)
