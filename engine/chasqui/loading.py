"""Handlers by name: ``MODULE:HANDLER``, for programs that are told on a command line what to run."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from chasqui.errors import ConfigError
from chasqui.handlers import BatchHandler, Router


def load_handler(spec: str) -> Any:
    """The handler of that name; every way in which it cannot be had is the user's to mend, and told in a line."""
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"expected MODULE:HANDLER, such as mail:send; got {spec!r:.80}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(f"there is no module {module_name!r:.80} in {here}, nor is one installed") from None
        raise ConfigError(f"{module_name} needs the module {error.name!r}, which is not installed") from None
    except Exception as error:  # noqa: BLE001 - the module is the user's, and may fail in any way
        raise ConfigError(f"{module_name} cannot be imported: {_place(error)}") from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{module_name} has no {path!r:.80}")
        found = getattr(found, name)
    if not isinstance(found, Router | BatchHandler) and not callable(found):
        raise ConfigError(f"{spec} is a {type(found).__name__}; expected a function, a Router or a batch handler")
    return found


def _place(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else said
