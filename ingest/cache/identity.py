"""What the result of a function depends on, as a digest: `digest_of`. It names what cannot be known (`Uncacheable`)."""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import importlib
import inspect
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from sluice.ingest.errors import LoaderError
from sluice.ingest.stages.transform import Transform

_FORM = 2
"""The form of entries. Entries of another form are not found."""
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_CALLABLES = (FunctionType, BuiltinFunctionType, type, np.ufunc)
"""Callables without a state of their own. Another object may hold anything, such as a vocabulary."""
_INSTALLED = tuple(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))


class Uncacheable(LoaderError):
    """A function's results cannot be kept, as what they depend on is not known."""


def digest_of(functions: Sequence[Transform], names: Sequence[str]) -> str:
    """Returns a digest of functions that are called one after the other, and of all that their results depend on but
    for the rows. `names` are the columns that entries have."""
    parts: list[Any] = [_FORM, platform.python_version(), names]
    for function in functions:
        if function.code is None:
            raise Uncacheable(
                f"{function.name!r} cannot be imported by its name, so nobody knows what it reads"
            )
        module, _, name = function.code.partition(":")
        loaded = getattr(importlib.import_module(module), name)
        known: dict[str, str] = {}
        _note(inspect.unwrap(loaded), function.name, known)
        gives = {name: str(kind) for name, kind in function.gives.items()}
        depends = {path: _content(path, function.name) for path in function.depends}
        parts.append([function.code, sorted(known.items()), function.reads, gives, depends])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _note(value: Any, name: str, known: dict[str, str]) -> None:
    """Notes what a function's code names: the sources of modules, versions of packages, and values."""
    _note_module(getattr(value, "__module__", None) or "", known)
    if not isinstance(value, FunctionType):
        return
    key = f"{value.__module__}:{value.__qualname__}"
    if key in known:
        return
    known[key] = ""
    if value.__closure__:
        raise Uncacheable(f"{name!r} uses {key}, which is a closure")
    if value.__defaults__ or value.__kwdefaults__:
        known[key] = repr((value.__defaults__, value.__kwdefaults__))
    for word in sorted(set(_globals_of(value.__code__))):
        if word not in value.__globals__:
            if not hasattr(builtins, word):
                raise Uncacheable(
                    f"{name!r} reads {word!r}, which {value.__module__} does not have"
                )
            continue
        found = inspect.unwrap(value.__globals__[word])
        if isinstance(found, ModuleType):
            _note_module(found.__name__, known)
        elif isinstance(found, _VALUES):
            known[f"{key} {word}"] = repr(found)
        elif isinstance(found, _CALLABLES):
            _note(found, name, known)
        else:
            raise Uncacheable(
                f"{name!r} reads the global {word!r} of {value.__module__}, which may change; make it in the function, "
                "and name the files that it reads in depends=[…]"
            )


def _note_module(name: str, known: dict[str, str]) -> None:
    """Notes the version of an installed package, or the source of another module and of all that it imports."""
    top = name.partition(".")[0]
    if not top or top in sys.stdlib_module_names or name in known:
        return
    try:
        found = find_spec(name)
    except (ImportError, AttributeError, ValueError):  # for instance, a name in a module
        return
    if found is None:
        return
    origin = Path(found.origin or "")
    if any(origin.is_relative_to(folder) for folder in _INSTALLED):
        known[f"{top} installed"] = str(
            getattr(importlib.import_module(top), "__version__", "")
        ) or _hash(origin)
        return
    known[name] = _hash(origin)
    package = name if found.submodule_search_locations else name.rpartition(".")[0]
    for other in _imports_of(origin, package):
        _note_module(other, known)


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else str(file)


def _imports_of(file: Path, package: str) -> Iterator[str]:
    """Yields the modules that a module may import, also within its functions, and the packages around them."""
    if file.suffix != ".py":
        return
    for node in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            names = [source, *(f"{source}.{name}" for name in names)]
        yield from (name[: dot.start()] for name in names for dot in re.finditer(r"\.|$", name))


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yields the global names that code reads, also in functions within it."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _content(path: str, name: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise LoaderError(f"transform {name!r}: depends: {path}: {error.strerror}") from None
