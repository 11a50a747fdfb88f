"""What a checkpoint says of itself: `Meta`, and where the newest one of a run is. Needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etl.table import FeatureTable

LATEST, META = "LATEST", "meta.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: its message says which and what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """Where a run stood, and what it was made of."""

    config: dict[str, Any]
    """The run's settings."""
    version: int
    """Of the feature table."""
    fingerprint: dict[str, str]
    columns: dict[str, int]
    """Sparse column → rows of its table, in the model's order."""
    dense: tuple[str, ...]
    """Dense columns, in the model's order."""
    step: int = 0
    """Batches trained since the start of the run, over all epochs."""
    epoch: int = 0
    """Epochs finished."""
    rows: int = 0
    """Rows trained since the start of the run."""
    loader: dict[str, Any] = field(default_factory=dict)
    """The loader's position: the next batch is the one after the last trained."""

    @classmethod
    def of(cls, table: FeatureTable, config: dict[str, Any]) -> Meta:
        """Of a run that has not begun."""
        return cls(config=config, version=table.version, **_shape(table))

    def check(self, table: FeatureTable, *, version: bool = True) -> None:
        """Raises CheckpointError with every difference to the table that is to be read."""
        now = _shape(table)
        differences = []
        if version and self.version != table.version:
            differences.append(f"version {self.version} in the checkpoint, {table.version} now")
        for name in sorted(self.columns.keys() | now["columns"].keys()):
            before, after = self.columns.get(name), now["columns"].get(name)
            if before != after:
                differences.append(f"column {name!r}: " + (
                    "not in the checkpoint" if before is None else "not in the table" if after is None
                    else f"{before} rows in the checkpoint, {after} in the table"))
        if tuple(self.dense) != now["dense"]:
            differences.append(f"dense columns: {', '.join(self.dense)} in the checkpoint, "
                               f"{', '.join(now['dense'])} in the table")
        if not differences and self.fingerprint != now["fingerprint"]:
            differences.append(f"fingerprint {self.fingerprint} in the checkpoint, {now['fingerprint']} in the table")
        if differences:
            raise CheckpointError(f"the checkpoint does not fit {table.uri}: " + "; ".join(differences))

    def write(self, folder: Path) -> None:
        """Makes a checkpoint's folder complete, then moves LATEST to it."""
        _replace(folder / META, json.dumps(asdict(self), indent=1))
        _replace(folder.parent / LATEST, folder.name + "\n")


def latest(checkpoints: Path) -> tuple[Path, Meta]:
    """The newest complete checkpoint of a run and what it says."""
    pointer = checkpoints / LATEST
    if not pointer.exists():
        raise CheckpointError(f"no checkpoint in {checkpoints} ({LATEST} is missing): nothing to go on from")
    path = checkpoints / pointer.read_text().strip()
    try:
        values = json.loads((path / META).read_text())
        return path, Meta(**{**values, "dense": tuple(values["dense"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from None


def _shape(table: FeatureTable) -> dict[str, Any]:
    return {"fingerprint": asdict(table.fingerprint),
            "columns": {f.name: f.cardinality for f in table.fields if f.role in ("sparse", "id_list")},
            "dense": tuple(f.name for f in table.fields if f.role == "dense")}


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, and on the disk."""
    part = path.with_name(path.name + ".part")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
