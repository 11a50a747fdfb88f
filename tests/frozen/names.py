"""The signatures of what a program may import: the names of docs/api.md, README.md and `sluice.__all__`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import sluice

PUBLIC = (
    *(f"sluice:{name}" for name in sorted(sluice.__all__)),
    "sluice.petastorm:PetastormOptions",
    "sluice.petastorm:TransformSpec",
    "sluice.petastorm:BatchReader",
    "sluice.petastorm:edit_field",
    "sluice.petastorm:make_batch_reader",
    "sluice.petastorm:make_spark_converter",
    "sluice.ingest.stages.transform:Transform",
    "sluice.agent.report.headroom:Headroom",
    "sluice.agent.tunable:Policy",
    "sluice.agent.tunable:Reason",
    "sluice.agent.tuning:TuningStatus",
    "sluice.common.errors:UsageError",
    "sluice.common.errors:InputError",
    "sluice.ingest.errors:LoadingError",
)
"""The addresses of the names, where programs import them from."""
DOCUMENTED = {
    "sluice:Loader": (
        "apply",
        "cardinalities",
        "close",
        "dense_names",
        "knobs",
        "load_state_dict",
        "memory",
        "memory_need",
        "quarantined",
        "sparse_names",
        "state_dict",
        "tuning",
    )
}
"""The members of a name that a program may use, where these are not all that have no leading underscore."""
_DUNDERS = (
    "__call__",
    "__contains__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__iter__",
    "__len__",
)


def record() -> dict[str, Any]:
    """Returns each public name with its signature, and those of its public members."""
    return {address: _described(address) for address in PUBLIC}


def _described(address: str) -> Any:
    module, _, name = address.partition(":")
    try:
        named = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return "missing"
    if not inspect.isclass(named):
        return _signature(named)
    own = [kind for kind in named.__mro__ if kind.__module__.startswith("sluice")]
    names = DOCUMENTED.get(address) or [
        name for kind in own for name in vars(kind) if not name.startswith("_")
    ]
    names = [*names, *(name for name in _DUNDERS if any(name in vars(kind) for kind in own))]
    initialiser = next((kind.__init__ for kind in own if "__init__" in vars(kind)), named)
    bases = [
        kind.__name__
        for kind in named.__mro__[1:]
        if kind.__module__ in ("builtins", "torch.utils.data.dataset")
    ]
    return {
        "()": _signature(initialiser),
        "is a": bases,
        **{name: _member(getattr(named, name)) for name in names},
    }


def _member(value: Any) -> str:
    return _signature(value) if callable(value) else "value"


def _signature(function: Any) -> str:
    """Returns the names, kinds and defaults of the parameters, without their types."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin, such as an exception's initialiser
        return "()"
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
