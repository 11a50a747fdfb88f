"""`Permission`: the modules and functions that a spec may import. `sluice.etl.spec.code_options` reads it from a
command line.

A table, a checkpoint and a run folder are data, so Sluice imports nothing because they name it. Code comes from the
user's own spec (`--spec FILE`) or from a module that the user allows (`--allow-code MODULE`). The user allows it each
time a program starts, because no permission is stored. Sluice's own operators need none.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sluice.common.errors import OperatorError

MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Permission:
    """Permission to import functions."""

    modules: frozenset[str] = frozenset()
    """Modules whose functions may be imported. Functions that such a module imports from another are not included."""
    functions: frozenset[str] = frozenset()
    """Single functions that may be imported, as "module:function"."""

    def __post_init__(self) -> None:
        for module in self.modules:
            if not MODULE_NAME.fullmatch(module):
                raise OperatorError(
                    f'allow_code: {module!r} is not the name of a module; write for instance "mine.features"'
                )

    @classmethod
    def of(cls, allowed: Permission | Iterable[str]) -> Permission:
        """Returns the permission of a caller, who passes a Permission or names of modules."""
        if isinstance(allowed, str):
            raise OperatorError(
                f"allow_code = {allowed!r}: must be several names; write ({allowed!r},)"
            )
        return allowed if isinstance(allowed, Permission) else cls(frozenset(allowed))

    def load(self, function: str, named_by: str) -> Callable[..., Any]:
        """Imports the function "module:function", which `named_by` names. Raises OperatorError if it may not or cannot
        be imported."""
        module, name = _parts(function)
        if function not in self.functions and module not in self.modules:
            raise OperatorError(
                f"{named_by} names the function {function!r}, which must run here. A table is data, so "
                f"its functions are imported only if you allow it: {_how_to_allow(module)}"
            )
        try:
            target: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise OperatorError(f"function = {function!r}: cannot be imported ({error})") from None
        if not callable(target):
            raise OperatorError(f"function = {function!r}: must be module:function")
        home = getattr(target, "__module__", None) or "builtins"
        if function not in self.functions and home not in self.modules:
            raise OperatorError(
                f"{named_by} names the function {function!r}, which {module} has from {home}, and that "
                f"module is not allowed: {_how_to_allow(home)}"
            )
        return target


def find_modules_here() -> None:
    """Makes modules of the current folder importable, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _parts(function: str) -> tuple[str, str]:
    module, colon, name = function.partition(":")
    if not colon or not MODULE_NAME.fullmatch(module) or not name.isidentifier():
        raise OperatorError(f"function = {function!r}: must be module:function")
    return module, name


def _how_to_allow(module: str) -> str:
    return (
        f"if you trust this code, pass --allow-code {module} (in Python: allow_code=({module!r},)), or --spec FILE "
        "with your own spec that names it"
    )


NOTHING = Permission()
