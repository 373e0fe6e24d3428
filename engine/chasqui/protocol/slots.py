"""Which node of a cluster has which slot, as far as the nodes have told.

The map is ours and not redis-py's, because theirs cannot be steered (seen with 8.1): at every fifth redirection its
asyncio client closes all connections, those in use too; after a lost one its close closes nothing and leaves sockets
open; and what it then learns comes from a node of its choice, which may not have heard of the move. A redirection says
where to go: this map goes there, and a node is asked only when it knows nothing.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from typing import Any, TypeAlias

from chasqui.protocol.flow import Refusal

SLOTS = 16384
ASK_FOR_SLOTS = ("CLUSTER", "SLOTS")
# A node answers so when a slot is not, or not yet, or no more its own. None of these was carried out.
REDIRECTIONS = frozenset({"MOVED", "ASK"})
UNSETTLED = REDIRECTIONS | {"TRYAGAIN", "CLUSTERDOWN"}

Place: TypeAlias = tuple[str, int]


class SlotMap:
    """Owners of slots. ``seeds`` are the nodes of the url: known for ever, though they may have left by now.

    Threads may share it: what it holds is replaced as a whole, never changed under a reader.
    """

    def __init__(self, seeds: Sequence[Place]) -> None:
        self._seeds = tuple(seeds)
        self._owners: list[Place | None] = [None] * SLOTS
        self._named: set[Place] = set()
        self._doubted: set[Place] = set()

    def owner(self, slot: int) -> Place | None:
        return self._owners[slot]

    def primaries(self) -> list[Place]:
        """All that have slots, in the order of these."""
        return [place for place in dict.fromkeys(self._owners) if place is not None]

    def to_ask(self) -> tuple[list[Place], list[Place]]:
        """Nodes that may know more, and those to ask only then: they did not answer the last time."""
        known = list(dict.fromkeys((*sorted(self._named), *self._seeds)))
        return [p for p in known if p not in self._doubted], [p for p in known if p in self._doubted]

    def doubt(self, place: Place) -> None:
        """It did not answer. Its slots may have gone to another node: all that we know is asked for again."""
        self._doubted = self._doubted | {place}
        self.forget()

    def forget(self) -> None:
        self._owners = [None] * SLOTS

    def learn(self, reply: Any, asked: Place) -> set[Place]:
        """Take over what a node said of all slots; returns the nodes that it no longer names."""
        owners: list[Place | None] = [None] * SLOTS
        named: set[Place] = set()
        for first, last, primary, *replicas in reply:
            place = _place_of(primary, asked)
            owners[int(first) : int(last) + 1] = [place] * (int(last) + 1 - int(first))
            named |= {place, *(_place_of(replica, asked) for replica in replicas)}
        gone, self._owners, self._named = self._named - named, owners, named
        self._doubted = (self._doubted - {asked}) & (named | {*self._seeds})
        return gone

    def follow(self, refusal: Refusal, asked: Place) -> Place | None:
        """Note where a redirection leads. Returns the node to ask this once; None where the map says all."""
        if refusal.code not in REDIRECTIONS:
            return None
        slot, _, where = refusal.text.partition(" ")
        host, _, port = where.rpartition(":")
        place = (_host(host, asked), int(port))
        if refusal.code == "ASK":
            return place
        self._owners[int(slot)] = place
        self._named = self._named | {place}
        self._doubted = self._doubted - {place}
        return None


def slot_of(key: str) -> int:
    """The slot of a key: that of what stands in its first braces, if there is something."""
    data = key.encode()
    start = data.find(b"{")
    end = data.find(b"}", start + 1) if start >= 0 else -1
    return crc_hqx(data[start + 1 : end] if end > start + 1 else data, 0) % SLOTS


def _place_of(node: Sequence[Any], asked: Place) -> Place:
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    return _host(host, asked), int(node[1])


def _host(host: str | None, asked: Place) -> str:
    """A node that does not know its own name, or is told not to say it, means: where you have found me."""
    return host if host and host != "?" else asked[0]
