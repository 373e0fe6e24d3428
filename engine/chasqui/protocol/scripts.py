"""The Lua scripts, one transition per file in ``lua/``; a script is called by the hash of its text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

# A script stops the server while it runs: no call handles more than this.
SCRIPT_ENTRIES = 1000
SCRIPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: str
    sha: str


@cache
def script(name: str) -> Script:
    """The script of that file; read as a package resource, so it also works from a zip of ``--py-files``."""
    source = resources.files(__package__).joinpath("lua", f"{name}.lua").read_text()
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def names() -> list[str]:
    """All scripts there are."""
    files = resources.files(__package__).joinpath("lua").iterdir()
    return sorted(f.name.removesuffix(".lua") for f in files if f.name.endswith(".lua"))
