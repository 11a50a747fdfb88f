"""What a checkpoint says of itself: `Meta`, and where the newest one of a run is. Needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dlrm.sums import damaged, sums_of
from etl.census import Census
from etl.table import FeatureTable, TableError

LATEST, BEST, META = "LATEST", "BEST", "meta.json"


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
    since: int = 0
    """Step at which this version of the table was taken up, at an epoch's beginning; 0 without --follow."""
    loader: dict[str, Any] = field(default_factory=dict)
    """The loader's position: the next batch is the one after the last trained."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """What the agent had come to: a resumed run starts with them."""
    agent: dict[str, Any] = field(default_factory=dict)
    """What it had learned of the loader's stages, and on which machine."""
    software: dict[str, str] = field(default_factory=dict)
    """Versions that wrote it."""
    sums: dict[str, int] = field(default_factory=dict)
    """The checkpoint's other files and their checksums; none in those of older programs."""
    trained: dict[str, Any] = field(default_factory=dict, repr=False)
    """Which rows it has seen, over all versions, to know them again: see `etl.census.Census`. Empty in those of older
    programs."""

    @classmethod
    def of(cls, table: FeatureTable, config: dict[str, Any]) -> Meta:
        """Of a run that has not begun."""
        return cls(config=config, version=table.version, software=_software(), **_shape(table),
                   trained=Census.of(table.records.values()).trained.to_json())

    def following(self, table: FeatureTable, config: dict[str, Any]) -> Meta:
        """The same place in the run, at the beginning of an epoch over another version."""
        now = Meta.of(table, config)
        if self.trained:
            now = replace(now, trained=self.seen().and_then(now.seen()).to_json())
        return replace(now, step=self.step, epoch=self.epoch, rows=self.rows, since=self.step, knobs=self.knobs)

    def seen(self) -> Census:
        """The rows that it was trained on, as far as they can be known again."""
        if self.trained:
            return Census.from_json(self.trained)
        try:
            return Census.of(FeatureTable.open(self.config["data"], self.version).records.values()).trained
        except TableError:
            return Census()

    def steps_in_all(self, steps: int, epochs: int) -> int:
        """Of a run that goes on from here up to so many epochs, if one has so many steps from here on."""
        into = self.loader.get("step", 0)  # the epoch that is under way
        return int(self.step - into + steps * (epochs - self.epoch))

    def check(self, table: FeatureTable, *, same_version: bool = True) -> None:
        """Raises CheckpointError with every difference to the table that is to be read."""
        now = _shape(table)
        differences = []
        if same_version and self.version != table.version:
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

    def other_software(self) -> str | None:
        """What was written by other versions than are here; None if all are the same."""
        now = _software()
        changed = [f"{name} {then} (here {now.get(name, 'none')})" for name, then in self.software.items()
                   if now.get(name) != then]
        return f"the checkpoint was written with {', '.join(changed)}" if changed else None

    def write(self, folder: Path) -> None:
        """Makes a checkpoint's folder complete, then moves LATEST to it."""
        whole = replace(self, sums=sums_of(folder))
        _replace(folder / META, json.dumps(asdict(whole), indent=1))
        _replace(folder.parent / LATEST, folder.name + "\n")


def latest(checkpoints: Path) -> tuple[Path, Meta]:
    """The newest complete checkpoint of a run and what it says."""
    _there(checkpoints.parent)
    pointer = checkpoints / LATEST
    if not pointer.exists():
        raise CheckpointError(f"no checkpoint in {checkpoints} ({LATEST} is missing): nothing to go on from")
    path = checkpoints / pointer.read_text().strip()
    return path, read(path)


def chosen(checkpoints: Path, *, take_best: bool) -> tuple[Path, Meta]:
    """The checkpoint that did best on validation, or the newest, and what it says."""
    if not take_best:
        return latest(checkpoints)
    _there(checkpoints.parent)
    found = best(checkpoints)
    if found is None:
        raise CheckpointError(f"no checkpoint in {checkpoints} was evaluated: leave --best out for the newest")
    return found[0], read(found[0])


def check(path: Path) -> None:
    """CheckpointError if a file is not as it was written."""
    refuse(path, damage(path))


def damage(path: Path, *, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with this rank's part of a checkpoint's files: together the ranks look at all."""
    sums = read(path).sums
    return damaged(path, sums, sorted(sums)[rank::ranks])


def refuse(path: Path, wrong: list[str]) -> None:
    """CheckpointError that says what is wrong and which other checkpoints there are, if anything is."""
    if not wrong:
        return
    others = [p.parent.name for p in sorted(path.parent.glob(f"step-*/{META}")) if p.parent != path]
    advice = (f"copy it here anew, or delete it and write {others[-1]} into {path.parent / LATEST} to go on from there"
              if others else "copy it here anew; there is no other")
    raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(wrong)}; {advice}")


def best(checkpoints: Path) -> tuple[Path, float] | None:
    """The checkpoint that did best on the validation split, and its AUC there; None before the first."""
    pointer = checkpoints / BEST
    if not pointer.exists():
        return None
    name, auc = pointer.read_text().split()
    return checkpoints / name, float(auc)


def mark_best(folder: Path, auc: float) -> None:
    """Says that this checkpoint is the best so far."""
    _replace(folder.parent / BEST, f"{folder.name} {auc!r}\n")


def read(path: Path) -> Meta:
    """What a complete checkpoint says."""
    try:
        values = json.loads((path / META).read_text())
        return Meta(**{**values, "dense": tuple(values["dense"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from None


def _there(run: Path) -> None:
    if not run.exists():
        raise CheckpointError(f"{run} does not exist: name a run folder of dlrm.train")


def _software() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "torchrec")}


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
