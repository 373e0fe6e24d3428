"""Leadership: a key that expires, taken and renewed by comparing.

Scripts that act as leader look at the same key in the same step (fencing): a leader that was stopped for longer than
its lease, and does not know it yet, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from chasqui.protocol.flow import Flow, call_script
from chasqui.protocol.replies import number
from chasqui.protocol.scripts import script


@dataclass(frozen=True, slots=True)
class Lease:
    """Which key, who we are, and how long it holds without renewal."""

    key: str
    holder: str
    ttl_ms: int

    def take(self) -> Flow[bool]:
        reply = yield from call_script(script("take_lease"), [self.key], [self.holder, self.ttl_ms], safe=True)
        return number(reply) == 1

    def release(self) -> Flow[bool]:
        return number((yield from call_script(script("release_lease"), [self.key], [self.holder], safe=True))) == 1
