"""What connectors build on: the engine's second public surface.

`chasqui` itself is for programs that add jobs and work on them. This module is for programs that carry jobs between a
queue and another system, such as the Spark connector: options in the house style, and bounded, blocking calls over
many queues. Names here change with the same care as those of `chasqui`.
"""

from __future__ import annotations

from chasqui.address import Address
from chasqui.address import parse as parse_url
from chasqui.options import ConnectionOptions, Settling, build, check, option, spell, table

__all__ = [
    "Address",
    "ConnectionOptions",
    "Settling",
    "build",
    "check",
    "option",
    "parse_url",
    "spell",
    "table",
]
