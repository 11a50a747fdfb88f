"""What a checkpoint says of itself: `CheckpointMeta`, and where the newest one of a run is. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sluice.common.errors import UsageError
from sluice.dlrm.checkpoint.checksums import damaged
from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.etl.table.split_rows import SplitRows
from sluice.etl.table.table import FeatureTable

LATEST = "LATEST"
BEST = "BEST"
META = "meta.json"
LAYOUT = "layout.json"


class CheckpointError(UsageError):
    """A checkpoint that cannot be used: its message says which and what differs."""


class NotFinite(CheckpointError):
    """A model that is not saved, or a checkpoint that is not loaded, as it holds NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """Where a run stood when it was saved, and what it was made of."""

    config: dict[str, Any]
    """The run's settings."""
    version: int
    """The version of the feature table."""
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
    skipped: int = 0
    """Batches that were left out since the start of the run, as their loss was no number; steps count them."""
    since: int = 0
    """Step at which the run moved on to this version of the table, at an epoch's beginning; 0 without --follow."""
    loader: dict[str, Any] = field(default_factory=dict)
    """The loader's position: the next batch is the one after the last trained."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """The knobs that the agent had arrived at: a resumed run starts with them."""
    agent: dict[str, Any] = field(default_factory=dict)
    """What the agent had learned of the loader's stages, and on which machine."""
    software: dict[str, str] = field(default_factory=dict)
    """The versions of the libraries that wrote the checkpoint."""
    sums: dict[str, int] = field(default_factory=dict)
    """The checkpoint's other files and their checksums; empty until it is written."""
    trained: dict[str, Any] = field(repr=False)
    """Which rows the run has seen, over all versions, so that they can be recognised: see
    `sluice.etl.table.split_rows.SplitRows`."""
    saved: int = 0
    """Number of this save in its run folder: a later one has a higher number, whatever its step. 0 until it is
    written."""

    @classmethod
    def of(cls, table: FeatureTable, config: dict[str, Any]) -> CheckpointMeta:
        """The state of a run that has not begun."""
        return cls(
            config=config,
            version=table.version,
            software=_software(),
            **_shape(table),
            trained=SplitRows.of(table.records.values()).trained.to_json(),
        )

    def following(self, table: FeatureTable, config: dict[str, Any]) -> CheckpointMeta:
        """The same place in the run, at the beginning of an epoch over another version."""
        now = CheckpointMeta.of(table, config)
        trained = self.seen().and_then(now.seen())
        return replace(
            now,
            trained=trained.to_json(),
            step=self.step,
            epoch=self.epoch,
            rows=self.rows,
            skipped=self.skipped,
            since=self.step,
            knobs=self.knobs,
            agent=self.agent,
        )

    def seen(self) -> SplitRows:
        """The rows that the run was trained on, as far as they can be recognised."""
        return SplitRows.from_json(self.trained)

    def steps_in_all(self, steps: int, epochs: int) -> int:
        """The steps of the whole run, if it goes on from here up to `epochs` epochs of `steps` steps each."""
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
            if before == after:
                continue
            if before is None:
                how = "not in the checkpoint"
            elif after is None:
                how = "not in the table"
            else:
                how = f"{before} rows in the checkpoint, {after} in the table"
            differences.append(f"column {name!r}: {how}")
        if tuple(self.dense) != now["dense"]:
            differences.append(
                f"dense columns: {', '.join(self.dense)} in the checkpoint, "
                f"{', '.join(now['dense'])} in the table"
            )
        if not differences and self.fingerprint != now["fingerprint"]:
            differences.append(
                f"fingerprint {self.fingerprint} in the checkpoint, {now['fingerprint']} in the table"
            )
        if differences:
            raise CheckpointError(
                f"the checkpoint does not fit {table.uri}: " + "; ".join(differences)
            )

    def other_software(self) -> str | None:
        """Says which libraries had another version when this was written; None if all are the same."""
        now = _software()
        changed = [
            f"{name} {then} (here {now.get(name, 'none')})"
            for name, then in self.software.items()
            if now.get(name) != then
        ]
        return f"the checkpoint was written with {', '.join(changed)}" if changed else None

    def put(self, folder: Path, files: CheckpointDisk) -> None:
        """Makes a checkpoint's folder complete."""
        files.write_whole(folder / META, json.dumps(asdict(self), indent=1))

    def write(self, folder: Path, sums: Mapping[str, int], files: CheckpointDisk) -> CheckpointMeta:
        """Makes a checkpoint's folder complete, then moves LATEST to it; CheckpointError if LATEST does not lead there
        afterwards. Returns what was written."""
        number = 1 + max((one.number for one in whole(folder.parent)), default=0)
        written = replace(self, sums=dict(sums), saved=number)
        written.put(folder, files)
        files.settle(folder.parent)  # before anything leads there
        files.write_whole(folder.parent / LATEST, folder.name + "\n")
        path, found = latest(folder.parent)
        if (path, found.saved) != (folder, number):
            raise CheckpointError(
                f"{folder.parent / LATEST} leads to {path.name}, although {folder.name} was written "
                "there: another program writes into this run folder"
            )
        return written


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete checkpoint, as far as its place among the others of its run goes."""

    number: int
    """The number of its save; 0: unknown."""
    name: str


def whole(checkpoints: Path) -> list[Whole]:
    """The complete checkpoints of a run, the one that was saved last at the end. One whose meta.json says nothing that
    can be read is among the first."""
    found = []
    for path in checkpoints.glob(f"step-*/{META}"):
        try:
            number = json.loads(path.read_text()).get("saved", 0)
        except (OSError, ValueError, AttributeError, RecursionError):
            number = 0
        found.append(Whole(number if isinstance(number, int) else 0, path.parent.name))
    return sorted(found, key=lambda one: (one.number, one.name))


def superfluous(found: Iterable[Whole], keep: int, needed: Iterable[str]) -> list[str]:
    """Which of a run's complete checkpoints may be removed: all but the last `keep`, and none that is needed."""
    names = [one.name for one in sorted(found, key=lambda one: (one.number, one.name))]
    stay = {*names[-keep:], *needed} if keep else set(needed)
    return [name for name in names if name not in stay]


def latest(checkpoints: Path) -> tuple[Path, CheckpointMeta]:
    """The newest complete checkpoint of a run and what it says."""
    _there(checkpoints.parent)
    pointer = checkpoints / LATEST
    if not pointer.exists():
        raise CheckpointError(
            f"no checkpoint in {checkpoints} ({LATEST} is missing): nothing to go on from"
        )
    path = checkpoints / lead(pointer)[0]
    return path, read(path)


def chosen(checkpoints: Path, *, take_best: bool) -> tuple[Path, CheckpointMeta]:
    """The checkpoint that did best on validation, or the newest, and what it says."""
    if not take_best:
        return latest(checkpoints)
    _there(checkpoints.parent)
    found = best(checkpoints)
    if found is None:
        raise CheckpointError(
            f"no checkpoint in {checkpoints} was evaluated: leave --best out for the newest"
        )
    return found[0], read(found[0])


def check(path: Path) -> None:
    """Raises CheckpointError if a file is not as it was written."""
    refuse(path, damage(path))


def damage(path: Path, *, rank: int = 0, ranks: int = 1) -> list[str]:
    """Says what is wrong with this rank's part of a checkpoint's files; together the ranks look at all of them."""
    sums = read(path).sums
    return damaged(path, sums, sorted(sums)[rank::ranks])


def refuse(path: Path, wrong: list[str]) -> None:
    """If anything is wrong, raises a CheckpointError that says what it is and which other checkpoints there are."""
    if not wrong:
        return
    others = [one.name for one in whole(path.parent) if one.name != path.name]
    advice = (
        f"copy it here anew, or delete it and write {others[-1]} into {path.parent / LATEST} to go on from there"
        if others
        else "copy it here anew; there is no other"
    )
    raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(wrong)}; {advice}")


def best(checkpoints: Path) -> tuple[Path, float] | None:
    """The checkpoint that did best on the validation split, and its AUC there; None before the first."""
    pointer = checkpoints / BEST
    if not pointer.exists():
        return None
    name, *figures = lead(pointer)
    try:
        return checkpoints / name, float(*figures)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{pointer} holds no single figure after {name!r}: write a checkpoint's name and its AUC "
            "into it, or delete it"
        ) from None


def mark_best(folder: Path, auc: float, files: CheckpointDisk | None = None) -> None:
    """Says that this checkpoint is the best so far."""
    (files or CheckpointDisk()).write_whole(folder.parent / BEST, f"{folder.name} {auc!r}\n")


def read(path: Path) -> CheckpointMeta:
    """Reads what a complete checkpoint says of itself."""
    try:
        values = json.loads((path / META).read_text())
        return CheckpointMeta(**{**values, "dense": tuple(values["dense"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from None


def lead(pointer: Path) -> list[str]:
    """The words in LATEST or BEST, the first of which names a folder next to that file."""
    try:
        words = pointer.read_text().split()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}") from None
    if not words or Path(words[0]).name != words[0] or words[0] in (".", ".."):
        raise CheckpointError(
            f"{pointer} names no checkpoint next to it: write the name of one into it"
        )
    return words


def _there(run: Path) -> None:
    if not run.exists():
        raise CheckpointError(f"{run} does not exist: name a run folder of dlrm.train")


def _software() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "torchrec")}


def _shape(table: FeatureTable) -> dict[str, Any]:
    return {
        "fingerprint": asdict(table.fingerprint),
        "columns": {f.name: f.cardinality for f in table.fields if f.role in ("sparse", "id_list")},
        "dense": tuple(f.name for f in table.fields if f.role == "dense"),
    }
