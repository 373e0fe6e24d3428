"""Ways in which a server or the connection to it breaks, for the tests of faults."""

from __future__ import annotations

import os
import signal

import pytest
import redis

from chasqui.embedded import EmbeddedServer
from tests.proxy import CUT, DROP_REPLY, Act, Proxy

each_break = pytest.mark.parametrize("act", [pytest.param(CUT, id="cut"), pytest.param(DROP_REPLY, id="reply lost")])
# With `everysec`, the default, the server writes its file later than it answers while the disk is busy: what is killed
# then has answered jobs that it loses.
KEEPS_DATA = {"appendonly": "yes", "appendfsync": "always"}


def gone(server: EmbeddedServer, proxy: Proxy, *, carried_out: bool) -> Act:
    """The server is killed at that command, before or after it was carried out, and does not come back."""

    def end() -> None:
        os.kill(server.pid, signal.SIGKILL)
        proxy.refuse()

    return Act(after=end, reply=False) if carried_out else Act(before=end, forward=False)


def proxy_of(server: EmbeddedServer) -> Proxy:
    assert server.port
    return Proxy(server.port)


def run_for_ever(url: str) -> str:
    """A script that ends when it is killed; meanwhile the server is busy."""
    with redis.Redis.from_url(url) as client:
        try:
            client.eval("while true do end", 0)
        except redis.ResponseError:
            return "killed"
    return "ended"


def is_busy(client: redis.Redis) -> bool:
    try:
        return not client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
