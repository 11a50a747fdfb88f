"""What the result of a function depends on, as a digest: `digest_of`. It names what cannot be known (`Uncacheable`)."""

from __future__ import annotations

import builtins
import dis
import hashlib
import importlib
import inspect
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from sluice.ingest.errors import LoaderError
from sluice.ingest.stages.transform import Transform

_FORM = 1
"""The form of entries. Entries of another form are not found."""
_VALUES = (bool, int, float, complex, str, bytes, type(None))


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
    if not isinstance(value, FunctionType):
        _note_module(sys.modules.get(getattr(value, "__module__", "") or ""), known)
        return
    key = f"{value.__module__}:{value.__qualname__}"
    if key in known:
        return
    known[key] = ""
    if value.__closure__:
        raise Uncacheable(f"{name!r} uses {key}, which is a closure")
    _note_module(sys.modules.get(value.__module__), known)
    if value.__defaults__ or value.__kwdefaults__:
        known[key] = repr((value.__defaults__, value.__kwdefaults__))
    for word in sorted(set(_globals_of(value.__code__))):
        if word not in value.__globals__:
            if not hasattr(builtins, word):
                raise Uncacheable(
                    f"{name!r} reads {word!r}, which {value.__module__} does not have"
                )
            continue
        found = value.__globals__[word]
        if isinstance(found, ModuleType):
            _note_module(found, known)
        elif isinstance(found, _VALUES):
            known[f"{key} {word}"] = repr(found)
        elif callable(found):
            _note(inspect.unwrap(found), name, known)
        else:
            raise Uncacheable(
                f"{name!r} reads the global {word!r} of {value.__module__}, which may change; make it in the function, "
                "or name its file in depends=[…]"
            )


def _note_module(module: ModuleType | None, known: dict[str, str]) -> None:
    """Notes a package's version, or the source of a module without one."""
    if module is None or module is builtins:
        return
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    if top.__name__ in sys.stdlib_module_names:
        return
    version = getattr(top, "__version__", None)
    if isinstance(version, str):
        known[top.__name__] = version
        return
    try:
        known[module.__name__] = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
    except (OSError, TypeError):
        known[module.__name__] = str(getattr(module, "__file__", ""))


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
