"""What a loader loads, and how: `LoaderConfig`. It goes down from the loader to its parts unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.etl.spec.permission import Permission
from sluice.ingest.cache.made_rows import CachePlace
from sluice.ingest.choices import Errors, History
from sluice.ingest.errors import LoaderError
from sluice.ingest.knobs import Knobs
from sluice.ingest.machine import Machine
from sluice.ingest.plain.roles import Roles
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.source_files import Paths
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order
from sluice.ingest.stages.transform import UserTransform

if TYPE_CHECKING:
    from sluice.etl.spec.spec import Spec
    from sluice.etl.table.table import FeatureTable


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The arguments of a loader, checked. The documentation of `sluice.Loader` holds for those of the same names."""

    source: FeatureTable | ParquetFiles | Paths
    batch_size: int
    split: str = "train"
    rank: int = 0
    ranks: int = 1
    seed: int = 0
    read_ahead_epochs: int = 1
    knobs: Knobs | None = None
    order: Order = Order()
    reading: Reading = Reading()
    errors: Errors = Errors()
    transforms: Iterable[UserTransform] = ()
    roles: Roles | str | None = None
    hash: Mapping[str, int] | None = None
    spec: Spec | str | os.PathLike[str] | None = None
    version: int | None = None
    fill: Mapping[str, float] | float | None = None
    memory_limit: int | None = None
    cores: int | None = None
    cache: CachePlace | None = None
    workers: str | None = None
    machine: Machine | None = None
    allow_code: Permission | Iterable[str] = ()
    history: History | None = None

    def __post_init__(self) -> None:
        if self.read_ahead_epochs < 1:
            raise LoaderError(
                f"epochs to read ahead: {self.read_ahead_epochs} is not a positive number"
            )
        if self.cores is not None and self.cores < 1:
            raise LoaderError(f"cores={self.cores} is not a positive number of cores")
        if self.history is not None and self.errors.on_error != "raise":
            raise LoaderError(
                f"history with on_error={self.errors.on_error!r}: a row that is left out would also be missing in the "
                "histories of later rows. Use on_error='raise'"
            )
