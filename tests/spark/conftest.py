"""One Spark for all tests of a process, and what they need beside it."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from chasqui import embedded

# Python workers must find the same packages, and Spark must not listen on the network.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A small local Spark. Tests that need another deployment start a process of their own."""
    home: Path = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("chasqui-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config("spark.local.dir", str(home / "local"))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.stopTimeout", "30s")
        .config("spark.sql.execution.pyspark.udf.faulthandler.enabled", "true")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    for query in session.streams.active:
        query.stop()
    session.stop()


# What does not depend on the kind of server runs once, on the embedded one: a Spark query costs a second.


@pytest.fixture(scope="session")
def one_server() -> Iterator[embedded.EmbeddedServer]:
    """The embedded server, for tests whose outcome does not depend on the server."""
    with embedded.start() as server:
        yield server


@pytest.fixture(scope="session")
def one_url(one_server: embedded.EmbeddedServer) -> str:
    return one_server.url


@pytest.fixture
def one_client(one_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(one_url, protocol=2) as plain:
        yield plain


@pytest.fixture
def one_queue(one_client: redis.Redis) -> Iterator[str]:
    """A queue name of the test's own; afterwards its keys are removed."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    yield name
    keys = list(one_client.scan_iter(match=f"{{chasqui:{name}*", count=1000))
    if keys:
        one_client.delete(*keys)
