"""``chasquictl``: look at queues, repair them, run a worker. One file per group of commands.

``program`` puts the commands together and turns errors into exit codes; ``screen`` is the only one that knows what a
terminal is; ``shown`` makes text and JSON out of values. Nothing of the engine is repeated here.
"""

from __future__ import annotations

from chasqui.cli.program import main

__all__ = ["main"]
