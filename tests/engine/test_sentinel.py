"""Sentinels: they lead to the primary, and after a failover to the new one."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from chasqui import AuthFailed, ConnectionLost, NewJob
from chasqui.embedded import EmbeddedServer, start
from tests.engine.conftest import Connect
from tests.engine.seen import in_stream, payloads
from tests.support import eventually


@dataclass(frozen=True)
class Guarded:
    """A primary and its replica, watched by one sentinel."""

    primary: EmbeddedServer
    replica: EmbeddedServer
    sentinel: redis.Redis
    url: str

    def leader(self) -> int:
        return int(self.sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")[1])

    def fail_over(self) -> None:
        """Swap the two. The sentinel tells the old primary only after ten seconds, and what that takes until then is
        lost by design; so here it is told at once.
        """
        eventually(self._asked_for_failover)
        eventually(lambda: self.leader() == self.replica.port, within=20)
        with redis.Redis.from_url(self.primary.url) as old:
            old.replicaof("127.0.0.1", self.replica.port)

    def _asked_for_failover(self) -> bool:
        try:
            return bool(self.sentinel.execute_command("SENTINEL", "FAILOVER", "mymaster"))
        except redis.ResponseError as error:
            if "NOGOODSLAVE" not in str(error):
                raise
            return False


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    from chasqui.embedded import _packaged_binary

    as_sentinel = tmp_path / "sentinel"
    as_sentinel.write_text(f'#!/bin/sh\nexec {_packaged_binary()} "$@" --sentinel\n')
    as_sentinel.chmod(0o755)
    with ExitStack() as stack:
        quick = ["repl-diskless-sync-delay 0"]
        primary = stack.enter_context(start(config=quick))
        replica = stack.enter_context(start(config=[*quick, f"replicaof 127.0.0.1 {primary.port}"]))
        with redis.Redis.from_url(replica.url, protocol=2) as client:
            eventually(lambda: client.role()[3] == b"connected")
        watch = [f"sentinel monitor mymaster 127.0.0.1 {primary.port} 1"]
        watch += ["sentinel down-after-milliseconds mymaster 500", "sentinel failover-timeout mymaster 3000"]
        server = stack.enter_context(start(binary=as_sentinel, config=watch))
        sentinel = stack.enter_context(redis.Redis.from_url(server.url, protocol=2))
        eventually(lambda: len(sentinel.execute_command("SENTINEL", "REPLICAS", "mymaster")) == 1)
        yield Guarded(primary, replica, sentinel, f"redis+sentinel://127.0.0.1:{server.port}/mymaster")
    gc.collect()  # connections left open are to be told here, not in the middle of another test


def test_a_sentinel_leads_to_the_primary_and_after_a_failover_to_the_new_one(
    guarded: Guarded, connect: Connect
) -> None:
    producer = connect(guarded.url, queue="q", reconnect_attempts=50)
    producer.add(0)
    producer.add_bulk([1, 2])
    with redis.Redis.from_url(guarded.primary.url, protocol=2) as client:
        assert client.execute_command("WAIT", 1, 5000) == 1

    guarded.fail_over()
    producer.add(3)
    producer.add(4, id="i")
    producer.add_bulk([5, 6])

    with redis.Redis.from_url(guarded.replica.url, protocol=2) as client:
        assert payloads(in_stream(client, "q")) == list(range(7))


def test_a_producer_goes_on_after_the_primary_was_killed(guarded: Guarded, connect: Connect) -> None:
    producer = connect(guarded.url, queue="q", reconnect_attempts=1000)
    producer.add(0)
    with redis.Redis.from_url(guarded.primary.url, protocol=2) as client:
        assert client.execute_command("WAIT", 1, 5000) == 1

    os.kill(guarded.primary.pid, signal.SIGKILL)
    producer.add(1, id="i")
    producer.add_bulk_jobs([NewJob(2, id="j")])

    with redis.Redis.from_url(guarded.replica.url, protocol=2) as client:
        assert payloads(in_stream(client, "q")) == [0, 1, 2]


def test_a_service_that_the_sentinel_does_not_know_is_told(guarded: Guarded, connect: Connect) -> None:
    producer = connect(guarded.url.replace("mymaster", "unknown"), queue="q", reconnect_attempts=1)

    with pytest.raises(ConnectionLost, match=r"redis\+sentinel://127\.0\.0\.1:\d+/unknown cannot be reached"):
        producer.add(1)


def test_the_password_of_the_sentinel_is_an_option(guarded: Guarded, connect: Connect) -> None:
    guarded.sentinel.execute_command("ACL", "SETUSER", "default", ">hunter2")

    connect(guarded.url, queue="q", sentinel_password="hunter2").add(1)

    with pytest.raises((AuthFailed, ConnectionLost)) as caught:
        connect(guarded.url, queue="q", sentinel_password="wrong-pass", reconnect_attempts=0).add(1)
    assert "wrong-pass" not in str(caught.value)


def test_a_sentinel_that_is_down_is_named_as_soon_as_reconnect_attempts_are_used_up(connect: Connect) -> None:
    producer = connect("redis+sentinel://127.0.0.1:1/mymaster", queue="q", reconnect_attempts=0)
    started = time.monotonic()

    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1/mymaster cannot be reached"):
        producer.add(1)

    assert time.monotonic() - started < 1


def test_close_leaves_no_connection_to_the_sentinel(guarded: Guarded, connect: Connect) -> None:
    def connections() -> int:
        return int(guarded.sentinel.info("clients")["connected_clients"])

    before = connections()
    producer = connect(guarded.url, queue="q")
    producer.add(1)

    producer.close()

    eventually(lambda: connections() == before, within=2)
