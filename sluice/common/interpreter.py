"""Makes the command line of a fresh interpreter that finds the same modules as this one and calls one function."""

from __future__ import annotations

import json
import sys

_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); module, _, name = "
    "sys.argv[2].partition(':'); getattr(importlib.import_module(module), name)(*sys.argv[3:])"
)


def command(function: str, *arguments: object) -> list[str]:
    """Returns the command line that calls `module:function` with these arguments, as texts."""
    return [sys.executable, "-c", _BOOT, json.dumps(sys.path), function, *map(str, arguments)]


def arguments_of(cmdline: list[str], function: str) -> list[str] | None:
    """Returns the arguments in a command line that calls this function. None: it does not call it."""
    words = cmdline[1:]
    return words[4:] if words[:2] == ["-c", _BOOT] and words[3:4] == [function] else None
