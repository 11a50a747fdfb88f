"""Describes a checkpoint: `CheckpointMeta`. Also finds the newest and the best checkpoint of a run. Needs no torch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.common import checked_json
from sluice.common.errors import UsageError
from sluice.dlrm.checkpoint.disk import CheckpointDisk, damaged_files
from sluice.etl.table.split_rows import SplitRows
from sluice.etl.table.table import FeatureTable

if TYPE_CHECKING:
    from sluice.dlrm.ranks import Ranks

LATEST = "LATEST"
"""Names the newest checkpoint."""
BEST = "BEST"
"""Names the checkpoint with the best validation AUC, and that AUC."""
EVALUATED = "EVALUATED"
"""Names the checkpoint of the newest validation."""
META = "meta.json"
LAYOUT = "layout.json"
_SUM = "crc32:"
"""A pointer's last word begins with it. A pointer that a user or version 0.3 wrote has no such word."""


class CheckpointError(UsageError):
    """A checkpoint cannot be used. The message names it and says what differs."""


class NotFinite(CheckpointError):
    """A model is not saved, or a checkpoint is not loaded, because it holds NaN or infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """The progress of a run when it was saved, with its settings, columns and versions."""

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
    """The step at which the run changed to this version of the table, at the start of an epoch. 0 without --follow."""
    loader: dict[str, Any] = field(default_factory=dict)
    """The loader's position: the batch after the last trained one."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """The agent's last knobs. A resumed run starts with them."""
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
    """The number of this save in its run folder. A later save has a higher number, whatever its step. 0 until it is
    written."""

    @classmethod
    def of(cls, table: FeatureTable, config: dict[str, Any]) -> CheckpointMeta:
        """Returns the state of a run that has not started."""
        return cls(
            config=config,
            version=table.version,
            software=_software(),
            **_shape(table),
            trained=SplitRows.of(table.records.values()).trained.to_json(),
        )

    def following(self, table: FeatureTable, config: dict[str, Any]) -> CheckpointMeta:
        """Returns the same progress, at the start of an epoch over another version."""
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
        """Returns the rows that the run was trained on, as far as they can be recognised."""
        return SplitRows.from_json(self.trained)

    def steps_in_all(self, steps: int, epochs: int) -> int:
        """Returns the steps of the run in all, if it continues up to `epochs` epochs of `steps` steps each."""
        steps_into_epoch = self.loader.get("step", 0)
        return int(self.step - steps_into_epoch + steps * (epochs - self.epoch))

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
                f"dense columns: {', '.join(self.dense)} in the checkpoint, {', '.join(now['dense'])} in the table"
            )
        if not differences and self.fingerprint != now["fingerprint"]:
            differences.append(
                f"fingerprint {self.fingerprint} in the checkpoint, {now['fingerprint']} in the table"
            )
            renewed = ", ".join(f.name for f in table.fields if f.values_rule > 1)
            if renewed:
                differences.append(
                    f"Earlier releases converted the values of {renewed}, or learned their ranges, in another way; if "
                    "one of them wrote the checkpoint, train "
                    f"anew: sluice train --data {table.uri} --run-dir NEW"
                )
        if differences:
            raise CheckpointError(
                f"the checkpoint does not fit {table.uri}: " + "; ".join(differences)
            )

    def other_software(self) -> str | None:
        """Returns a text about the libraries that had another version when this was written. None: all are the same."""
        now = _software()
        changed = [
            f"{name} {then} (here {now.get(name, 'none')})"
            for name, then in self.software.items()
            if now.get(name) != then
        ]
        return f"the checkpoint was written with {', '.join(changed)}" if changed else None

    def write(self, folder: Path, sums: Mapping[str, int], files: CheckpointDisk) -> CheckpointMeta:
        """Makes a checkpoint's folder complete, then points LATEST to it. Returns what was written. Raises
        CheckpointError if another program changed LATEST meanwhile."""
        number = 1 + max(complete_checkpoints(folder.parent).values(), default=0)
        written = replace(self, sums=dict(sums), saved=number)
        written.put(folder, files)
        write_pointer(folder.parent / LATEST, [folder.name], files)
        path, meta = latest(folder.parent)
        if (path, meta.saved) != (folder, number):
            raise CheckpointError(
                f"{folder.parent / LATEST} leads to {path.name}, although {folder.name} was written "
                "there: another program writes into this run folder"
            )
        return written

    def put(self, folder: Path, files: CheckpointDisk) -> None:
        """Makes a checkpoint's folder complete. A pointer may name it then."""
        files.write_atomically(folder / META, checked_json.write(asdict(self)))
        files.sync_folder(folder.parent)  # before LATEST points there


def complete_checkpoints(checkpoints: Path) -> dict[str, int]:
    """Returns the names of a run's complete checkpoints, in the order of saving, each with the number of its save. 0:
    its meta.json is unreadable or damaged."""
    numbers = {}
    for path in checkpoints.glob(f"step-*/{META}"):
        try:
            number = checked_json.read(path.read_bytes())[0].get("saved", 0)
        except (OSError, ValueError, RecursionError):
            number = 0
        numbers[path.parent.name] = number if isinstance(number, int) else 0
    return dict(sorted(numbers.items(), key=lambda item: (item[1], item[0])))


def latest(checkpoints: Path) -> tuple[Path, CheckpointMeta]:
    """Returns the newest complete checkpoint of a run, and its meta."""
    _require_run(checkpoints.parent)
    pointer = checkpoints / LATEST
    if not pointer.exists():
        raise CheckpointError(
            f"no checkpoint in {checkpoints} ({LATEST} is missing): nothing to go on from"
        )
    name, *more = read_pointer(pointer)
    if more:
        raise CheckpointError(f"{pointer} holds more than a name; {_advice(pointer)}")
    return checkpoints / name, read(checkpoints / name)


def find_checkpoint(checkpoints: Path, *, take_best: bool) -> tuple[Path, CheckpointMeta]:
    """Returns the newest checkpoint, or with `take_best` the best on validation, and its meta."""
    if not take_best:
        return latest(checkpoints)
    _require_run(checkpoints.parent)
    chosen = best(checkpoints)
    if chosen is None:
        raise CheckpointError(
            f"no checkpoint in {checkpoints} was evaluated: leave --best out for the newest"
        )
    return chosen[0], read(chosen[0])


def check(path: Path, world: Ranks | None = None) -> None:
    """Raises CheckpointError if a file is not as it was written. The message names another checkpoint to use. With
    several ranks, each reads a part of the files, and all raise the same error."""
    sums = read(path).sums
    rank, ranks = (world.rank, world.ranks) if world is not None else (0, 1)
    wrong = damaged_files(path, sums, sorted(sums)[rank::ranks])
    if world is not None:
        wrong = [text for texts in world.gather_objects(wrong) for text in texts]
    if not wrong:
        return
    raise CheckpointError(f"checkpoint {path} is damaged: {'; '.join(wrong)}; {_other(path)}")


def best(checkpoints: Path) -> tuple[Path, float] | None:
    """Returns the checkpoint with the best validation AUC, and that AUC. None: no checkpoint was evaluated."""
    pointer = checkpoints / BEST
    if not pointer.exists():
        return None
    name, *figures = read_pointer(pointer)
    try:
        auc = float(*figures)
        if not 0 <= auc <= 1:
            raise ValueError
        return checkpoints / name, auc
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{pointer} holds no single AUC after {name!r}; {_advice(pointer)}"
        ) from None


def mark_best(folder: Path, auc: float, files: CheckpointDisk | None = None) -> None:
    """Marks this checkpoint as the best so far."""
    write_pointer(folder.parent / BEST, [folder.name, repr(auc)], files)


def mark_evaluated(folder: Path, files: CheckpointDisk | None = None) -> None:
    """Notes that the validation of this checkpoint is done, and BEST is up to date."""
    write_pointer(folder.parent / EVALUATED, [folder.name], files)


def is_evaluated(folder: Path) -> bool:
    """Whether the newest validation is that of this checkpoint."""
    pointer = folder.parent / EVALUATED
    return pointer.exists() and read_pointer(pointer) == [folder.name]


def read(path: Path) -> CheckpointMeta:
    """Reads the meta of a complete checkpoint."""
    try:
        values, is_checked = checked_json.read((path / META).read_bytes())
        meta = CheckpointMeta(**{**values, "dense": tuple(values["dense"])})
        if not is_checked:
            _check_unsummed(path, meta)
        return meta
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {META}: {error}; {_other(path)}"
        ) from None


def _check_unsummed(path: Path, meta: CheckpointMeta) -> None:
    """Raises ValueError if a meta that version 0.3 wrote, without a checksum, contradicts itself or its folder."""
    if not path.name.startswith(f"step-{meta.step:09d}"):
        raise ValueError(f"step {meta.step} is not that of the folder's name")
    if meta.loader.get("epoch", meta.epoch) != meta.epoch:
        raise ValueError(f"epoch {meta.epoch} is not the loader's, {meta.loader['epoch']}")


def write_pointer(pointer: Path, words: Sequence[str], files: CheckpointDisk | None = None) -> None:
    """Writes LATEST, BEST or EVALUATED, with a checksum."""
    text = f"{' '.join(words)} {_sum_of(words)}\n"
    (files or CheckpointDisk()).write_atomically(pointer, text)


def read_pointer(pointer: Path) -> list[str]:
    """Returns the words in a pointer. The first word names a folder next to that file."""
    try:
        words = pointer.read_text().split()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer} cannot be read: {error}; {_advice(pointer)}") from None
    if words and (pointer.name == EVALUATED or words[-1].startswith(_SUM)):
        stated = words.pop()
        if stated != _sum_of(words):
            raise CheckpointError(f"{pointer} is not as it was written; {_advice(pointer)}")
    if not words or Path(words[0]).name != words[0] or words[0] in (".", ".."):
        raise CheckpointError(f"{pointer} names no checkpoint next to it; {_advice(pointer)}")
    return words


def _sum_of(words: Sequence[str]) -> str:
    return f"{_SUM}{zlib.crc32(' '.join(words).encode()):08x}"


def _advice(pointer: Path) -> str:
    """Returns what to do about a pointer that cannot be used."""
    if pointer.name == EVALUATED:
        return "delete it: --resume then evaluates the newest checkpoint again"
    if pointer.name == BEST:
        return "write a checkpoint's name and its AUC into it, or delete it"
    names = list(complete_checkpoints(pointer.parent))
    newest = f": {names[-1]} was saved last" if names else ""
    return f"write the name of a checkpoint into it, and nothing else{newest}"


def _other(path: Path) -> str:
    """Returns what to do about a damaged checkpoint, with the name of another one."""
    others = [name for name in complete_checkpoints(path.parent) if name != path.name]
    if not others:
        return "copy it here anew; there is no other"
    pointer = path.parent / LATEST
    return (
        f"copy it here anew, or delete it and write {others[-1]} into {pointer} to go on from there"
    )


def _require_run(run: Path) -> None:
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
