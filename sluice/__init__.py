"""Tuned ingestion for recommender training.

    from sluice import Loader

    with Loader("clicks/*.parquet", batch_size=8192, tuning="auto") as loader:
        for batch in loader:
            …

The packages are `sluice.etl` (features), `sluice.ingest` (loading), `sluice.agent` (tuning) and `sluice.dlrm`
(training). Importing `sluice` loads none of them: a name is looked up when it is first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.agent.report.headroom import report
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.batch import BagColumn, Batch
    from sluice.ingest.choices import Errors, History
    from sluice.ingest.knobs import Knobs
    from sluice.ingest.process.matrix_function import takes_matrix
    from sluice.ingest.read.sources import Reading
    from sluice.ingest.row_order import Order
    from sluice.ingest.stages.transform import Transform
    from sluice.loader import Loader

__all__ = [
    "BagColumn",
    "Batch",
    "Errors",
    "FeatureTable",
    "History",
    "Knobs",
    "Loader",
    "Order",
    "Reading",
    "Transform",
    "report",
    "takes_matrix",
]

_HOMES = {
    "BagColumn": "sluice.ingest.batch",
    "Batch": "sluice.ingest.batch",
    "Errors": "sluice.ingest.choices",
    "FeatureTable": "sluice.etl.table.table",
    "History": "sluice.ingest.choices",
    "Knobs": "sluice.ingest.knobs",
    "Loader": "sluice.loader",
    "Order": "sluice.ingest.row_order",
    "Reading": "sluice.ingest.read.sources",
    "Transform": "sluice.ingest.stages.transform",
    "report": "sluice.agent.report.headroom",
    "takes_matrix": "sluice.ingest.process.matrix_function",
}

# Arrow's allocator returns freed memory to the system after 10 ms, and takes it again for the next row group: clearing
# those pages costs more than decoding. It looks at this once, when Arrow is loaded. Memory that runs short is still
# returned at once (`Pipeline` asks for it).
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

# `sluice/etl`, `sluice/ingest`, `sluice/agent` and `sluice/dlrm` are links in git to the folders next to this one.
_HERE = Path(__file__).resolve().parent
if (_HERE.parent / "pyproject.toml").is_file() and not (_HERE / "etl").is_dir():
    raise SystemExit(
        f"error: {_HERE / 'etl'} is not a link to the folder {_HERE.parent / 'etl'}: this checkout was made without "
        "symbolic links. Run: git config core.symlinks true && git checkout -- sluice"
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
