"""Saving, with a crash at any call of the file system, and what a torn disk then holds: the last whole checkpoint.

A seed decides all of it: how often is saved, where that ends, and what of all that was not yet on the disk came there.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from sluice.dlrm.checkpoint.meta import check
from tests.dlrm.rig import META, Alone
from tests.dlrm.test_checkpoint import parts_of
from tests.product import (
    Checkpoint,
    CheckpointDisk,
    CheckpointError,
    Checkpoints,
    SaveMemory,
    best,
    complete_checkpoints,
    latest,
    mark_best,
)

pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("SEEDS", "60"))


class Crash(BaseException):
    """The machine is gone; nobody handles that."""


@dataclass(eq=False)
class File:
    now: bytes = b""
    safe: bytes = b""
    """What the disk holds for certain."""

    def torn(self, chance: random.Random) -> bytes:
        if self.now == self.safe:
            return self.now
        cut = chance.randrange(len(self.now) + 1)
        return chance.choice(
            [self.safe, self.now, self.now[:cut], self.now[:cut] + bytes(len(self.now) - cut)]
        )


@dataclass(eq=False)
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)
    """Changes of names that are not yet on the disk; each is there whole or not at all."""

    def change(self, **names: File | Folder | None) -> None:
        self.pending.append(names)
        _apply(self.now, names)

    def torn(self, chance: random.Random) -> dict[str, File | Folder]:
        files = dict(self.safe)
        for names in self.pending:
            if chance.random() < 0.5:
                _apply(files, names)
        return files


def _apply(held: dict[str, File | Folder], names: dict[str, File | Folder | None]) -> None:
    for name, what in names.items():
        if what is None:
            held.pop(name, None)
        else:
            held[name] = what


class Disk(CheckpointDisk):
    """A folder, and what a crash would leave of it. Names may come to the disk in any order until their folder is
    settled, and a file's bytes in part until they are synced. The call number `dies_at` is the last one."""

    def __init__(self, root: Path, dies_at: int | None) -> None:
        self.root, self.dies_at, self.calls = root, dies_at, 0
        self.top = self._read(root)

    def _read(self, folder: Path) -> Folder:
        held = {
            path.name: self._read(path)
            if path.is_dir()
            else File(path.read_bytes(), path.read_bytes())
            for path in folder.iterdir()
        }
        return Folder(dict(held), held)

    def _at(self, path: Path) -> Folder:
        entry = self.top
        for name in path.relative_to(self.root).parts:
            entry = entry.now[name]
        return entry

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.dies_at:
            raise Crash

    def make(self, folder: Path) -> None:
        self._call()
        if not folder.exists():
            self._at(folder.parent).change(**{folder.name: Folder()})
            folder.mkdir()

    def write(self, path: Path, parts) -> None:
        self._call()
        held = self._at(path.parent)
        if path.name not in held.now:
            held.change(**{path.name: File()})
        file = held.now[path.name]
        file.now = b""
        for part in parts:
            file.now += bytes(part)
            path.write_bytes(file.now)
            self._call()
        self.sync(file)

    def sync(self, file: File) -> None:
        file.safe = file.now

    def sync_folder(self, folder: Path) -> None:
        self._call()
        held = self._at(folder)
        held.safe, held.pending = dict(held.now), []

    def replace(self, old: Path, new: Path) -> None:
        self._call()
        held = self._at(old.parent)
        held.change(**{new.name: held.now[old.name], old.name: None})
        old.replace(new)

    def remove(self, path: Path) -> None:
        self._call()
        self._at(path.parent).change(**{path.name: None})
        super().remove(path)

    def crash(self, into: Path, chance: random.Random) -> None:
        """What is left, as a folder."""
        self._leave(self.top, into, chance)

    def _leave(self, folder: Folder, into: Path, chance: random.Random) -> None:
        into.mkdir()
        for name, what in folder.torn(chance).items():
            if isinstance(what, File):
                (into / name).write_bytes(what.torn(chance))
            else:
                self._leave(what, into / name, chance)


def life(
    disk: Disk, checkpoints: Path, step: int, chance: random.Random, promised: list[int]
) -> None:
    """A run that saves until it dies, or is over. `promised` gets each step that was said to be saved."""
    weight = torch.zeros(3)
    saved = Checkpoints(
        checkpoints, parts_of(lambda: {"weight": weight}), Alone(), keep=2, files=disk
    )  # type: ignore[arg-type]
    try:
        for number in range(step + 1, step + 1 + chance.randint(1, 4)):
            weight.fill_(number)
            saved.save(replace(META, step=number))
            saved.wait()
            promised.append(number)
            if chance.random() < 0.3:
                mark_best(saved.path, 0.5, disk)
    finally:
        saved.close()


def storm(seed: int, folder: Path, kind: type[Disk] = Disk) -> int:
    """Five lives; how many ended in the middle of something. AssertionError if one finds less than was promised."""
    chance = random.Random(seed)
    root, crashes, promised = folder / "0", 0, []
    root.mkdir()
    (root / "checkpoints").mkdir()
    for number in range(1, 6):
        disk = kind(root, dies_at=chance.randint(1, 120))
        checkpoints = root / "checkpoints"
        if chance.random() < 0.3 and (names := list(complete_checkpoints(checkpoints))):
            # Somebody goes back to an older one; what came after it stays.
            back = chance.choice(names)
            (checkpoints / "LATEST").write_text(back + "\n")
            disk, promised = kind(root, disk.dies_at), [latest(checkpoints)[1].step]
        begins = latest(checkpoints)[1].step if (checkpoints / "LATEST").exists() else 0
        try:
            with patch.object(SaveMemory, "copies", chance.random() < 0.5):
                life(disk, checkpoints, begins, chance, promised)
        except Crash:
            crashes += 1
        root = folder / str(number)
        disk.crash(root, chance)
        promised = saved_step(root / "checkpoints", promised, begins)
        shutil.rmtree(folder / str(number - 1))
    return crashes


def saved_step(checkpoints: Path, promised: list[int], begins: int) -> list[int]:
    """Its step: the one that was promised last, or the one that was being written, whole, with the numbers that were
    saved. Whatever else looks whole is."""
    if not promised and not (checkpoints / "LATEST").exists():
        return []
    try:
        path, meta = latest(checkpoints)
        check(path)
        values = Checkpoint(path).tensors(["model.weight"])["model.weight"].tolist()
        good = best(checkpoints)
        for name in {
            *(checkpoints / other for other in complete_checkpoints(checkpoints)),
            *(good or ())[:1],
        }:
            check(name)
    except CheckpointError as error:
        raise AssertionError(str(error)) from error
    assert values == [float(meta.step)] * 3
    last = promised[-1] if promised else begins
    assert meta.step in (last, last + 1), f"step {meta.step} is there, and {last} was promised"
    return [meta.step]


def storms(folder: Path, kind: type[Disk] = Disk) -> int:
    crashes = 0
    for seed in range(SEEDS):
        (folder / str(seed)).mkdir()
        crashes += storm(seed, folder / str(seed), kind)
    return crashes


def test_whenever_a_save_is_broken_off_the_last_whole_checkpoint_is_found(tmp_path):
    assert storms(tmp_path) > SEEDS


class NoNames(Disk):
    def sync_folder(self, folder: Path) -> None: ...


class NoBytes(Disk):
    def sync(self, file: File) -> None: ...


class NoOrder(Disk):
    """The pointer to a folder comes before the folder's own name."""

    def sync_folder(self, folder: Path) -> None:
        if folder.name != "checkpoints" or (folder / "LATEST.part").exists():
            super().sync_folder(folder)


@pytest.mark.parametrize("kind", [NoNames, NoBytes, NoOrder])
def test_a_saving_that_leaves_out_a_sync_is_found_out(tmp_path, kind):
    with pytest.raises(AssertionError):
        storms(tmp_path, kind)
