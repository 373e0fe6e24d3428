"""Scripts, run by a plain client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script

Run = Callable[..., Any]


@pytest.fixture
def keys(queue: str) -> Keys:
    return Keys(queue)


@pytest.fixture
def run(client: redis.Redis) -> Run:
    """Runs a script of that name with keys and arguments."""

    def call(name: str, names: list[str], *args: Any) -> Any:
        return client.eval(script(name).source, len(names), *names, *args)

    return call
