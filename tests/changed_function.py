"""`changed`: a function with a mistake in it, for tests of instruments that must find mistakes."""

import builtins
import dis
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any


def changed(owner: Any, name: str, old: str, new: str) -> Callable[..., Any]:
    """Returns a function of a class or a module with a piece of its source replaced."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{name} has no {old!r}: write this mistake anew"
    text = "from __future__ import annotations\n" + source.replace(old, new)
    names, made = vars(sys.modules[function.__module__]), dict[str, Any]()
    exec(compile(text, inspect.getfile(function), "exec"), names, made)
    unknown = _global_names(made[name].__code__) - names.keys() - vars(builtins).keys()
    assert not unknown, f"{name}: its module has no {unknown}, so any seed would find this mistake"
    return made[name]


def _global_names(code: CodeType) -> set[str]:
    """The global names that a function uses, and those within it."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*map(_global_names, inner))
