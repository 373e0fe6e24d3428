"""The proxy, told by script: ``proxy.on("ack_delete", act=DROP_REPLY)`` means the next call of that script."""

from __future__ import annotations

import redis

from chasqui.embedded import EmbeddedServer
from chasqui.protocol.scripts import names, script
from tests.proxy import PASS, Act, Proxy

_BY_SHA = {script(name).sha.encode(): name.upper() for name in names()}


class ScriptProxy(Proxy):
    """Counts and breaks script calls under the script's name, EVALSHA only; other commands as usual.

    A rule that was never reached would make a test say nothing, so it fails it.
    """

    def on(self, command: str, *, nth: int = 1, act: Act, may_be_missed: bool = False) -> None:
        assert command.isupper() or command.upper() in _BY_SHA.values(), f"there is no script {command}"
        super().on(command, nth=nth, act=act)
        if not may_be_missed:
            self._awaited.add((command.upper(), self.counts[command.upper()] + nth))

    def __init__(self, target_port: int) -> None:
        self._awaited: set[tuple[str, int]] = set()
        super().__init__(target_port)

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        missed = self._awaited & self._rules.keys()
        assert kind is not None or not missed, f"never reached: {missed}"

    def _next_act(self, command: bytes) -> Act:
        parts = command.split(b"\r\n", 5)
        if parts[2].upper() != b"EVALSHA":
            return super()._next_act(command)
        name = _BY_SHA[parts[4]]
        with self._lock:
            self.counts[name] += 1
            return self._rules.pop((name, self.counts[name]), PASS)


def script_proxy(server: EmbeddedServer) -> ScriptProxy:
    """A proxy in front of a server that has all scripts: so the first call of one is carried out."""
    assert server.port
    with redis.Redis.from_url(server.url, protocol=2) as client:
        for name in names():
            client.script_load(script(name).source)
    return ScriptProxy(server.port)
