"""The loader: stages from Parquet to training batches, in an exact order, resized while they run.

`sluice.report(batches)` says of any iterable of batches how much of a step waits for it."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the loader only when somebody asks for it: contracts in this package stay light."""
    if name == "report":
        from sluice.ingest.tools.headroom import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "ingest":  # imported by its folder's name, as `python -m ingest` does in a checkout: still one module
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.ingest")
