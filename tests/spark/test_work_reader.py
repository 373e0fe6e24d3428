"""The reading task of a worker(), called as Spark calls it: a connection that breaks on the way loses no job."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from chasqui import ConnectionLost
from chasqui.bridge import Claims, ConnectionOptions, PayloadCodec, SettleTerms
from chasqui.embedded import EmbeddedServer
from chasqui.protocol.scripts import script
from chasqui_spark.consume_reader import BatchPartition
from chasqui_spark.handling import Handling
from chasqui_spark.links import link_of
from chasqui_spark.options import SourceOptions
from chasqui_spark.work_reader import WorkReader, packed
from tests.proxy import CUT, DROP_REPLY, Act, Proxy
from tests.spark.consume_tools import add, pending, waiting
from tests.support import eventually

JOBS = 3000
RAN: Counter[int] = Counter()
AT: dict[int, Callable[[], object]] = {}


def handler(job: Any) -> None:
    RAN[job.payload] += 1
    if job.payload in AT:
        AT.pop(job.payload)()


@pytest.fixture
def claimed(url: str, queue: str) -> Iterator[BatchPartition]:
    """A batch of so many jobs, and the partition that is all of it."""
    RAN.clear()
    add(url, queue, JOBS)
    sid = uuid.uuid4().hex
    claims = Claims(ConnectionOptions(url=url), sid=sid, terms=SettleTerms(ack="settle"))
    assert claims.claim(queue, 1, limit=JOBS) == JOBS
    plan = claims.plan(queue, 1)
    yield BatchPartition(queue, sid, 1, plan.token, [(block, 0, size) for block, size in enumerate(plan.sizes, 1)])
    claims.close()


def work(url: str, queue: str, partition: BatchPartition) -> int:
    """Rows that leave the task."""
    options = SourceOptions(
        url=url,
        queue=queue,
        mode="consume",
        ack="settle",
        reconnect_attempts=2,
        reconnect_initial_ms=5,
        reconnect_max_ms=10,
    )
    try:
        reader = WorkReader(options, packed(Handling(handler, PayloadCodec())))
        return sum(batch.num_rows for batch in reader.read(partition))
    finally:
        link_of(options).close()


def told(client: redis.Redis, queue: str) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for _, fields in client.xrange(f"{{chasqui:{queue}}}:events"):
        found.setdefault(fields[b"id"], []).append(fields[b"e"])
    return found


def test_every_job_is_run_once_settled_and_told_in_order(
    url: str, client: redis.Redis, queue: str, claimed: BatchPartition
) -> None:
    assert work(url, queue, claimed) == JOBS

    assert (waiting(client, queue), pending(client, queue)) == (0, {})
    assert set(Counter(map(tuple, told(client, queue).values())).items()) == {((b"active", b"completed"), JOBS)}


@pytest.mark.parametrize("act", [CUT, DROP_REPLY], ids=["cut", "reply lost"])
def test_a_connection_lost_while_settling_is_not_noticed(
    server: EmbeddedServer, client: redis.Redis, queue: str, claimed: BatchPartition, act: Act
) -> None:
    with Proxy(int(server.port or 0)) as proxy:
        proxy.on("EVALSHA", having=script("settle_done").sha, nth=2, act=act)

        assert work(proxy.url, queue, claimed) == JOBS

    assert (waiting(client, queue), pending(client, queue)) == (0, {})
    assert set(RAN.values()) == {1}


def test_a_task_that_cannot_settle_fails_and_the_next_one_runs_only_what_was_not(
    server: EmbeddedServer, client: redis.Redis, url: str, queue: str, claimed: BatchPartition
) -> None:
    with Proxy(int(server.port or 0)) as proxy:

        def leave() -> None:
            eventually(lambda: waiting(client, queue) < JOBS)
            proxy.refuse()
            proxy.drop_all()

        AT[JOBS // 2] = leave

        with pytest.raises(ConnectionLost):
            work(proxy.url, queue, claimed)
    left = waiting(client, queue)
    assert 0 < left < JOBS

    assert work(url, queue, claimed) == left

    assert (waiting(client, queue), pending(client, queue)) == (0, {})
    assert len(RAN) == JOBS
    assert all(times <= 2 for times in RAN.values())
