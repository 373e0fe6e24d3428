"""What the listener does for queries of mode=consume, called as Spark calls it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from chasqui.bridge import BatchJobs, Claims, ConnectionOptions, Link, SettleTerms
from chasqui.embedded import EmbeddedServer
from chasqui_spark.committed import Committed
from chasqui_spark.consume_offsets import ConsumeOffset
from tests.proxy import CUT, Proxy
from tests.spark.consume_tools import add, waiting

JOBS = 5
NOTHING = ConsumeOffset()


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def driver(url: str, queue: str, run: str) -> Iterator[Claims]:
    """A driver in the middle of its first batch, which Spark runs."""
    add(url, queue, JOBS)
    sid = uuid.uuid4().hex
    claims = Claims(ConnectionOptions(url=url), sid=sid, terms=SettleTerms())
    claims.claim(queue, 1, limit=JOBS)
    token = claims.plan(queue, 1).token
    link = Link(ConnectionOptions(url=url))
    with BatchJobs(link, queue=queue, group="default", sid=sid, seq=1, token=token).task(run):
        pass
    link.close()
    yield claims
    claims.close()


def progress(run: str, start: ConsumeOffset, end: ConsumeOffset) -> Any:
    source = SimpleNamespace(startOffset=json.dumps(start.json()), endOffset=json.dumps(end.json()))
    return SimpleNamespace(runId=run, sources=[source])


def test_a_committed_batch_that_could_not_be_settled_then_is_settled_before_the_stop_is_told(
    driver: Claims, server: EmbeddedServer, client: redis.Redis, queue: str, run: str
) -> None:
    with Proxy(int(server.port or 0)) as proxy:
        listener = Committed(ConnectionOptions(url=proxy.url, reconnect_initial_ms=1))
        for nth in (1, 2):
            proxy.on("EVALSHA", nth=nth, act=CUT)
        listener.committed(progress(run, NOTHING, ConsumeOffset(driver.sid, {queue: 1})))
        assert waiting(client, queue) == JOBS

        listener.ended(run, failed=False)

    assert waiting(client, queue) == 0
    assert driver.leave(1) == 0


def test_jobs_of_a_committed_batch_that_cannot_be_settled_are_not_given_back(
    driver: Claims, server: EmbeddedServer, client: redis.Redis, queue: str, run: str
) -> None:
    with Proxy(int(server.port or 0)) as proxy:
        listener = Committed(ConnectionOptions(url=proxy.url, reconnect_initial_ms=1))
        for nth in range(1, 5):
            proxy.on("EVALSHA", nth=nth, act=CUT)

        listener.committed(progress(run, NOTHING, ConsumeOffset(driver.sid, {queue: 1})))
        listener.ended(run, failed=False)

    assert driver.leave(1) == 0
    assert waiting(client, queue) == JOBS


def test_a_query_whose_first_progress_was_without_jobs_gives_back_what_it_took_later(
    driver: Claims, url: str, run: str
) -> None:
    listener = Committed(ConnectionOptions(url=url))

    listener.committed(progress(run, NOTHING, NOTHING))
    listener.ended(run, failed=False)

    assert driver.leave(1) == JOBS
