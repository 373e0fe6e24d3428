"""Both colours of the producer behind one face: tests call, and do not know whether something was awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chasqui import AsyncProducer, Producer, embedded
from chasqui.embedded import EmbeddedServer
from tests.conftest import server_binaries
from tests.proxy import Proxy

Connect = Callable[..., Any]


class Awaited:
    """An AsyncProducer whose calls are awaited on the loop of another thread, so that threads may call it as well."""

    def __init__(self, producer: AsyncProducer, loop: asyncio.AbstractEventLoop) -> None:
        self.producer, self.loop = producer, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.producer, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(found(*args, **options), self.loop).result(60)

        return call

    def __repr__(self) -> str:
        return repr(self.producer)


@pytest.fixture(scope="session")
def event_loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop, running in a thread of its own, for everything that tests await."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        yield loop
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connect(colour: str, event_loop_thread: asyncio.AbstractEventLoop) -> Iterator[Connect]:
    """Makes producers of the test's colour, closed when it ends. Reconnecting is tried often and quickly."""
    # Each is closed whatever the test or the closing of another one raises: a socket left open would be told later, as
    # the fault of a test that has nothing to do with it.
    with contextlib.ExitStack() as made:

        def make(url: str, **options: Any) -> Any:
            options = {"reconnect_initial_ms": 5, "reconnect_max_ms": 20} | options
            producer: Any = (
                Producer(url, **options)
                if colour == "sync"
                else Awaited(AsyncProducer(url, **options), event_loop_thread)
            )
            made.callback(producer.close)
            return producer

        yield make


@pytest.fixture
def producer(connect: Connect, url: str, queue: str) -> Any:
    return connect(url, queue=queue)


@pytest.fixture
def start_like(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[Callable[..., EmbeddedServer]]:
    """Starts servers of the kind of ``server`` that the test may stop, fill and configure; stopped when it ends."""
    binary = server_binaries()[request.node.callspec.params["server"]]
    with contextlib.ExitStack() as started:

        def start(**options: Any) -> EmbeddedServer:
            return started.enter_context(embedded.start(binary=binary, **options))

        yield start


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    assert server.port
    with Proxy(server.port) as between:
        yield between
