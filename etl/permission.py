"""Which code may be taken because a spec names it: `Permission`, and the options that give it.

A table, a checkpoint and a run folder are data: nothing is imported because they name it. Code comes from the user's
own spec (`--spec FILE`) or from a module that the user allows (`--allow-code MODULE`), each time a program begins: what
was allowed is recorded nowhere. Operators of our own need neither.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etl.ops.base import OperatorError

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Permission:
    """Leave to import functions."""

    modules: frozenset[str] = frozenset()
    """Whose own functions may be imported: those that such a module only borrows from another are not meant."""
    functions: frozenset[str] = frozenset()
    """Single ones, as "module:function"."""

    def __post_init__(self) -> None:
        for module in self.modules:
            if not _MODULE.fullmatch(module):
                raise OperatorError(f"allow_code: {module!r} is no module's name; write for instance \"mine.features\"")

    @classmethod
    def of(cls, allowed: Permission | Iterable[str]) -> Permission:
        """What a caller allows, given as this or as the names of modules."""
        if isinstance(allowed, str):
            raise OperatorError(f"allow_code = {allowed!r}: must be several names; write ({allowed!r},)")
        return allowed if isinstance(allowed, Permission) else cls(frozenset(allowed))

    def load(self, function: str, named_by: str) -> Callable[..., Any]:
        """The function "module:function", which `named_by` names; OperatorError unless it may be imported, and can."""
        module, colon, name = function.partition(":")
        if not colon or not _MODULE.fullmatch(module) or not name.isidentifier():
            raise OperatorError(f"function = {function!r}: must be module:function")
        if function not in self.functions and module not in self.modules:
            raise OperatorError(f"the spec of {named_by} names the function {function!r}, which must run here. A table "
                                f"is data, so nothing it names is imported unless you say so: {_how(module)}")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise OperatorError(f"function = {function!r}: cannot be imported ({error})") from None
        if not callable(found):
            raise OperatorError(f"function = {function!r}: must be module:function")
        home = getattr(found, "__module__", None) or "builtins"
        if function not in self.functions and home not in self.modules:
            raise OperatorError(f"the spec of {named_by} names the function {function!r}, which {module} has from "
                                f"{home}, and that module is not allowed: {_how(home)}")
        loaded: Callable[..., Any] = found
        return loaded


def _how(module: str) -> str:
    return (f"if you trust this code, give --allow-code {module} (in Python: allow_code=({module!r},)), or with --spec "
            "FILE the spec of your own that names it")


NOTHING = Permission()


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Of every program that reads a table or a run folder, so that one command line fits all."""
    parser.add_argument("--allow-code", metavar="MODULE", type=_module, action="append", default=argparse.SUPPRESS,
                        help="let the table's spec name functions of this module to be imported and run; may be given "
                        "again, and is not remembered (default: none; built-in operators need no leave)")
    parser.add_argument("--spec", metavar="FILE", dest="own_spec", type=_spec, default=argparse.SUPPRESS,
                        help="a spec of your own: the functions that it names may be imported and run")


def given(options: argparse.Namespace) -> Permission:
    """What these options allow."""
    own = getattr(options, "own_spec", None)
    return Permission(frozenset(getattr(options, "allow_code", ())), _functions(own) if own else frozenset())


def _module(text: str) -> str:
    if not _MODULE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no module's name; write for instance mine.features")
    return text


def _spec(path: str) -> str:
    _functions(path)
    return path


def _functions(path: str) -> frozenset[str]:
    """Those that a user's spec names; nothing is imported yet."""
    from etl.spec import Spec

    try:
        return Spec.parse(Path(path).read_text("utf-8"), path).functions
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: the spec cannot be read ({error})") from None


def words(options: argparse.Namespace) -> list[str]:
    """The same options for another program's command line."""
    found = [word for module in getattr(options, "allow_code", ()) for word in ("--allow-code", module)]
    return [*found, *(("--spec", options.own_spec) if "own_spec" in options else ())]
