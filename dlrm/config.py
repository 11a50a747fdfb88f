"""One training run, written down: `Config`, a frozen tree that is checked once, here, and stored as config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from etl.fields import Field

OPTIMISERS = ("adagrad", "adam")
TUNINGS = ("auto", "planner", "fixed")
SHARDINGS = ("auto", "row", "table", "column")


class ConfigError(ValueError):
    """A run that cannot be: its message names the setting or column, its value and what would do."""


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigError(f"{name}: {value!r} is not a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table: a column's ids are its row numbers."""

    name: str
    rows: int
    width: int
    lookups: float = 1.0
    """Ids a row of data brings, on average."""

    @property
    def bytes(self) -> int:
        """Of its float32 weights."""
        return self.rows * self.width * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DLRM: dense features through one tower, ids through tables, pairwise dot products, a second tower."""

    width: int = 16
    """Of every embedding, and of the dense tower's output."""
    dense_layers: tuple[int, ...] = (128, 64)
    """Hidden layers of the dense tower; a last one of `width` is added."""
    over_layers: tuple[int, ...] = (256, 128)
    """Hidden layers after the interaction; a last one of 1 is added."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        object.__setattr__(self, "over_layers", tuple(self.over_layers))
        _positive(self, "width")
        if self.width % 4:
            raise ConfigError(f"width: {self.width} is not a multiple of 4, which the fused kernels need")
        for name in ("dense_layers", "over_layers"):
            if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in getattr(self, name)):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not a list of positive layer sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Tables are updated within the backward pass by row-wise Adagrad; dense layers by an optimiser of their own."""

    lr: float = 0.05
    """Of the tables."""
    dense_optimiser: str = "adam"
    dense_lr: float = 0.001

    def __post_init__(self) -> None:
        _positive(self, "lr", "dense_lr")
        if self.dense_optimiser not in OPTIMISERS:
            raise ConfigError(f"dense optimiser: {self.dense_optimiser!r} is none of {', '.join(OPTIMISERS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that decides what a run does. What may differ between two runs with the same result stands last."""

    data: str
    """Address of the feature table."""
    version: int
    """Version of it that is read."""
    batch_size: int = 4096
    """Rows of a global batch; each rank takes an equal part."""
    epochs: int = 1
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sharding: str = "auto"
    """One of SHARDINGS, or the path of a JSON file with a kind for each column."""
    ranks: int = 1
    tuning: str = "auto"
    knobs: str = ""
    """Knobs to start with, as the command line has them."""
    reader: str = "petastorm"
    memory_limit: int | None = None
    """Bytes that one rank's loader may use; None: what the machine and its control groups leave."""
    log_every: int = 20
    """Steps between two lines of the log; ranks agree there whether to stop."""
    save_every: int = 0
    """Steps between two checkpoints within an epoch; 0: one at the end of each epoch only."""

    def __post_init__(self) -> None:
        _positive(self, "batch_size", "epochs", "ranks", "log_every")
        if self.save_every < 0:
            raise ConfigError(f"save_every: {self.save_every} is below 0")
        if self.batch_size % self.ranks:
            raise ConfigError(f"batch size {self.batch_size} cannot be cut into equal parts for {self.ranks} ranks")
        if self.tuning not in TUNINGS:
            raise ConfigError(f"tuning: {self.tuning!r} is none of {', '.join(TUNINGS)}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**{**values, "model": ModelConfig(**values["model"]), "optim": OptimConfig(**values["optim"])})


def tables_of(fields: Sequence[Field], model: ModelConfig) -> tuple[Table, ...]:
    """The embedding tables that a feature table's columns need, in its order."""
    found = []
    for f in fields:
        if f.role not in ("sparse", "id_list"):
            continue
        if f.cardinality is None:
            raise ConfigError(f"column {f.name!r}: no cardinality in the table, so its embedding has no size")
        found.append(Table(name=f.name, rows=f.cardinality, width=model.width, lookups=f.bag[1] if f.bag else 1.0))
    if not found:
        raise ConfigError("the table has no sparse column: a DLRM needs at least one (role \"sparse\" in the spec)")
    if not any(f.role == "dense" for f in fields):
        raise ConfigError("the table has no dense column: a DLRM needs at least one (role \"dense\" in the spec)")
    if not any(f.role == "label" for f in fields):
        raise ConfigError("the table has no label column (role \"label\" in the spec)")
    return tuple(found)
