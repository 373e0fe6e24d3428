"""A queue with entries in the hands of workers, for the tests of the scripts that settle and take over."""

from __future__ import annotations

from typing import Any

import redis

from chasqui.protocol.keys import Keys
from chasqui.protocol.scripts import script

GROUP = "g"


class Pending:
    """Entries are named by what stands in their ``d``; scripts are called as they are stored."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self.client, self.keys = client, Keys(queue)
        client.xgroup_create(self.keys.stream, GROUP, 0, mkstream=True)

    def call(self, name: str, keys: list[str], *args: Any) -> Any:
        return self.client.eval(script(name).source, len(keys), *keys, *args)

    def add(self, *data: str) -> list[bytes]:
        return [self.client.xadd(self.keys.stream, {"d": one}) for one in data]

    def taken(self, consumer: str, *data: str, idle_ms: int = 0, deliveries: int = 1) -> list[bytes]:
        """New entries that this worker has taken, so long ago, at the so-manieth delivery; returns their ids."""
        added = self.add(*data)
        self.client.xreadgroup(GROUP, consumer, {self.keys.stream: ">"}, count=len(added))
        self.give(consumer, added, idle_ms=idle_ms, deliveries=deliveries)
        return added

    def give(self, consumer: str, ids: list[bytes], *, idle_ms: int = 0, deliveries: int = 1) -> None:
        self.client.xclaim(self.keys.stream, GROUP, consumer, 0, ids, idle=idle_ms, retrycount=deliveries, justid=True)

    @property
    def stream(self) -> list[str]:
        return [fields[b"d"].decode() for _, fields in self.client.xrange(self.keys.stream)]

    @property
    def pending(self) -> list[tuple[bytes, str, int]]:
        """Entry id, owner and count of deliveries."""
        found = self.client.xpending_range(self.keys.stream, GROUP, "-", "+", 10_000)
        return [(p["message_id"], p["consumer"].decode(), p["times_delivered"]) for p in found]

    def idle_ms(self, entry_id: bytes) -> int:
        (found,) = self.client.xpending_range(self.keys.stream, GROUP, entry_id, entry_id, 1)
        return int(found["time_since_delivered"])

    @property
    def delayed(self) -> dict[str, float]:
        return {member.decode(): at for member, at in self.client.zrange(self.keys.delayed, 0, -1, withscores=True)}

    @property
    def dead(self) -> list[dict[str, str]]:
        """The dead letters, fields in the order in which they are stored."""
        return [
            {name.decode(): value.decode() for name, value in fields.items()}
            for _, fields in self.client.xrange(self.keys.dlq)
        ]

    def now_ms(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000
