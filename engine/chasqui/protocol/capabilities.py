"""What the server can do. One place asks; the roles do not know which way was taken.

The three arrived in different releases (XACKDEL 8.2, CLAIM 8.4, IDMP 8.6), so one does not imply another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chasqui.protocol.flow import Batch, Flow, Refusal, command
from chasqui.protocol.keys import Keys


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``ack_delete``: XACKDEL. ``claim_on_read``: XREADGROUP ... CLAIM. ``idempotent_add``: XADD ... IDMP."""

    ack_delete: bool = False
    claim_on_read: bool = False
    idempotent_add: bool = False


def probe(keys: Keys) -> Flow[Capabilities]:
    """Ask the server's own documentation; where it has none (before 7.0, or forbidden), try each once.

    The trials name a key that does not exist, so they change nothing on a server that knows them.
    """
    try:
        documents = yield command("COMMAND", "DOCS", "XACKDEL", "XREADGROUP", "XADD", safe=True)
        found = dict(zip(map(_lower, documents[::2]), documents[1::2], strict=False))
        if b"xadd" in found:
            return Capabilities(
                ack_delete=b"xackdel" in found,
                claim_on_read=_has_token(found.get(b"xreadgroup"), b"CLAIM"),
                idempotent_add=_has_token(found[b"xadd"], b"IDMP"),
            )
    except Refusal:
        pass
    nowhere = f"{keys.prefix}:nowhere"
    replies = yield Batch(
        (
            command("XACKDEL", nowhere, "g", "IDS", 1, "0-1", safe=True),
            command("XREADGROUP", "GROUP", "g", "c", "CLAIM", 1, "STREAMS", nowhere, ">", safe=True),
            command("XADD", nowhere, "NOMKSTREAM", "IDMP", "p", "i", "*", "f", "v", safe=True),
        )
    )
    return Capabilities(*(_understood(reply) for reply in replies))


def _lower(name: Any) -> bytes:
    return bytes(name).lower()


def _has_token(document: Any, token: bytes) -> bool:
    """Whether that word stands as an argument's token anywhere in the nested reply."""
    stack = [document]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif item == token:
            return True
    return False


def _understood(reply: Any) -> bool:
    """NOGROUP and nil are answers of a server that knows the command; ERR (unknown, syntax) and NOPERM are not."""
    return not isinstance(reply, Refusal) or reply.code == "NOGROUP"
