"""The reader of mode=consume, called as Spark calls it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from pyspark.sql.streaming.datasource import ReadMaxRows

from chasqui import Producer
from chasqui_spark.consume_reader import ConsumeReader
from chasqui_spark.options import source_options
from chasqui_spark.views import schema_of
from tests.spark.consume_tools import QUIET, pending


@pytest.fixture
def no_signals() -> Iterator[None]:
    """The reader takes SIGTERM for itself, as the process that Spark starts for it is its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def reader_of(url: str, **options: str) -> ConsumeReader:
    given: dict[str, Any] = {"url": url, "mode": "consume", **QUIET, **options}
    chosen = source_options(given, streaming=True)
    return ConsumeReader(chosen, schema_of(chosen))


@pytest.mark.usefixtures("no_signals")
def test_queues_share_a_limit_in_bytes(one_url: str, one_client: redis.Redis, one_queue: str) -> None:
    queues = [one_queue, *(f"{one_queue}-{i}" for i in range(4))]
    for name in queues:
        with Producer(one_url, queue=name) as producer:
            producer.add_bulk([b"x" * 1000] * 500)
    reader = reader_of(one_url, queues=",".join(queues), maxBytesPerTrigger="500000")

    reader.latestOffset(reader.initialOffset(), ReadMaxRows(100_000))

    taken = [len(pending(one_client, name)) for name in queues]
    assert 450 < sum(taken) < 550
    assert min(taken) > 50
    reader.stop()
