"""Which checkpoints stay, and what is left when one cannot be written. Nothing here is sharded: see test_ranks.py."""

import errno
import json
import os
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sluice.dlrm.checkpoint.checkpoint import TensorChunk, TensorPart
from sluice.dlrm.checkpoint.meta import NotFinite, check
from tests.dlrm.rig import META as FIRST
from tests.dlrm.rig import Alone, written
from tests.product import (
    LAYOUT,
    Checkpoint,
    CheckpointDisk,
    CheckpointError,
    Checkpoints,
    best,
    find_checkpoint,
    latest,
    layout_of,
    mark_best,
    write_pieces,
)
from tests.raises import assert_names, raises

META = replace(FIRST, software={"torch": "1.0"})


class Second:
    """Of two ranks; the first found nothing wrong with its part."""

    rank, ranks = 1, 2

    def gather_objects(self, value):
        return [[], value]


def parts_of(state_dict):
    """Of a model with this state, which nothing trains."""
    nothing = SimpleNamespace(state_dict=dict)
    model = SimpleNamespace(state_dict=state_dict)
    return SimpleNamespace(model=model, table_states=nothing, dense=nothing)


class Disk(CheckpointDisk):
    """That is full where `room` is False."""

    room = True

    def write(self, path, parts):
        super().write(path, parts if self.room else [b"half"])
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of one number."""
    weight, disk, lines = torch.ones(3), Disk(), []
    parts = parts_of(lambda: {"weight": weight})
    checkpoints = Checkpoints(tmp_path, parts, Alone(), keep=2, record=lines.append, files=disk)  # type: ignore[arg-type]
    yield SimpleNamespace(
        checkpoints=checkpoints, folder=tmp_path, weight=weight, disk=disk, lines=lines
    )
    checkpoints.close()


def weight_in(path):
    return Checkpoint(path).tensors(["model.weight"])["model.weight"]


def steps(folder):
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))


def test_what_is_saved_is_the_state_at_the_call_though_training_goes_on(saved):
    saved.checkpoints.save(replace(META, step=1))
    saved.weight.fill_(9.0)
    saved.checkpoints.wait()
    path, meta = latest(saved.folder)
    assert weight_in(path).tolist() == [1.0] * 3
    assert meta.step == 1
    assert saved.lines[0]["path"] == path.name


def test_what_was_saved_last_stays_whatever_its_step_and_where_latest_was_set_back_to(saved):
    """A run goes on from an older checkpoint: its new ones have lower steps than the discarded ones."""
    _with_steps(saved, 10, 20, 30)
    mark_best(saved.folder / "step-000000030", 0.9)
    for step in (40, 50, 60):
        (saved.folder / f"step-{step:09d}").mkdir()  # half-written: runs were killed here
    (saved.folder / "LATEST").write_text("step-000000020\n")
    assert _with_steps(saved, 21).name == "step-000000021"
    assert steps(saved.folder) == [21, 30]
    for step in (22, 23):
        path = _with_steps(saved, step)
        assert path.name == f"step-{step:09d}"
        check(path)
    assert steps(saved.folder) == [22, 23, 30]
    assert [latest(saved.folder)[1].saved, best(saved.folder)] == [
        6,
        (saved.folder / "step-000000030", 0.9),
    ]
    (path / PART).write_text("spoilt")
    with raises(CheckpointError, "write step-000000022 into"):
        check(path)


def test_a_step_that_is_saved_again_replaces_nothing_that_is_needed(saved):
    first = _with_steps(saved, 10)
    mark_best(first, 0.9)
    saved.weight.fill_(2.0)
    again = _with_steps(saved, 10)
    assert (first.name, again.name) == ("step-000000010", "step-000000010-2")
    assert [weight_in(p)[0].item() for p in (first, again)] == [1.0, 2.0]


def test_a_link_under_a_temporary_name_is_not_followed(saved):
    _with_steps(saved, 1)
    (saved.folder / "victim").write_text("as it was")
    (saved.folder / "LATEST.part").symlink_to(saved.folder / "victim")
    with raises(CheckpointError, "OSError", "LATEST.part"):
        _with_steps(saved, 2)
    assert (saved.folder / "victim").read_text() == "as it was"
    assert latest(saved.folder)[1].step == 1


def test_a_file_that_the_disk_holds_otherwise_than_written_is_no_checkpoint(saved):
    """Nor does it cost one that is."""
    _with_steps(saved, 1, 2)

    class Lying(Disk):
        def write(self, path, parts):
            super().write(path, parts)
            if path.name == PART:
                path.write_bytes(path.read_bytes()[:-1] + b"x")

    saved.checkpoints.files = Lying()
    with raises(CheckpointError, "step-000000003", PART):
        _with_steps(saved, 3)
    assert steps(saved.folder) == [1, 2]
    check(latest(saved.folder)[0])


def test_another_program_that_writes_into_the_run_folder_is_noticed(saved):
    _with_steps(saved, 1)

    class Other(Disk):
        def write_atomically(self, path, text):
            super().write_atomically(path, text if path.name != "LATEST" else "step-000000001\n")

    saved.checkpoints.files = Other()
    with raises(CheckpointError, "step-000000002", "another program"):
        _with_steps(saved, 2)


def test_latest_names_a_folder_once_its_name_and_all_its_files_are_on_the_disk(saved):
    calls = []

    class Recording(Disk):
        def sync_folder(self, folder):
            super().sync_folder(folder)
            calls.append(f"{folder.name} is on the disk")

        def replace(self, old, new):
            super().replace(old, new)
            calls.append(f"{new.name} is named")

    saved.checkpoints.files = Recording()
    path, checkpoints = _with_steps(saved, 1), saved.folder.name
    written = [f"{path.name} is on the disk", "meta.json is named", f"{path.name} is on the disk"]
    pointed = [f"{checkpoints} is on the disk", "LATEST is named", f"{checkpoints} is on the disk"]
    assert calls == written + pointed


def test_elements_that_no_rank_holds_are_missed_when_saved_and_when_read(saved):
    piece = TensorPart("t", torch.zeros(2), (0,), (4,))
    part = write_pieces(CheckpointDisk(), saved.folder, PART, [piece])
    with raises(ValueError, "t has 4 elements", "hold 2"):
        layout_of([part], {})
    path = _with_steps(saved, 1)
    layout = json.loads((path / LAYOUT).read_text())
    layout["tensors"]["model.weight"]["chunks"] = []
    (path / LAYOUT).write_text(json.dumps(layout))
    with raises(CheckpointError, "holds 0 of 3 elements of model.weight"):
        weight_in(path)


@pytest.mark.parametrize("file", ["../part", "..", ""])
def test_a_piece_lies_in_the_checkpoints_own_folder(file):
    with raises(ValueError, "own folder"):
        TensorChunk((0,), (1,), file, "t")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_saved_the_newest_finite_state_is_latest_and_nothing_else_is_there(saved, seed):
    """A drawn row of states, some of which hold NaN or infinity."""
    chance, finite = random.Random(seed), []
    for step in range(1, 12):
        bad = chance.choice((None, None, float("nan"), float("inf"), -float("inf")))
        saved.weight.fill_(step)
        if bad is not None:
            saved.weight[chance.randrange(3)] = bad
        if bad is None:
            _with_steps(saved, step)
            finite.append(step)
        else:
            with raises(NotFinite, f"step-{step:09d}", "model.weight (1 of 3)"):
                _with_steps(saved, step)
        assert steps(saved.folder) == finite[-2:]
        if finite:
            assert latest(saved.folder)[1].step == finite[-1]


def test_a_checkpoint_that_is_not_finite_is_not_loaded_and_the_newest_that_is_is_named(saved):
    """As another program may leave them: the last ones are not finite, and LATEST leads to them."""
    _with_steps(saved, 1, 2)
    for step in (3, 4):
        weight = torch.tensor([1.0, float("nan"), float("inf")])
        written(
            {"model.weight": weight}, saved.folder / f"step-{step:09d}", replace(META, step=step)
        )
    path, _ = latest(saved.folder)
    assert path.name == "step-000000004"
    with raises(NotFinite, "step-000000004", "model.weight (2 of 3)", "step-000000002", "LATEST"):
        weight_in(path)
    for step in (1, 2):
        shutil.rmtree(saved.folder / f"step-{step:09d}")
    with pytest.raises(
        NotFinite, match="no other checkpoint of this run is finite: begin another run"
    ):
        weight_in(path)


def test_a_written_file_is_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "os.fsync", lambda number: synced.append(os.path.samestat(os.fstat(number), os.stat(path)))
    )
    path = tmp_path / "part"
    CheckpointDisk().write(path, [b"x"])
    assert synced == [True]


def test_a_full_disk_is_an_error_that_leaves_the_one_before(saved):
    _with_steps(saved, 1)
    saved.disk.room = False
    with raises(CheckpointError, "step-000000002", "OSError", "No space left"):
        _with_steps(saved, 2)
    assert steps(saved.folder) == [1]
    assert latest(saved.folder)[1].step == 1
    saved.disk.room = True
    _with_steps(saved, 3)
    assert latest(saved.folder)[1].step == 3


def test_a_missing_run_is_distinguished_from_one_without_a_checkpoint(tmp_path):
    for take_best in (False, True):
        with raises(CheckpointError, "nope", "does not exist"):
            find_checkpoint(tmp_path / "nope" / "checkpoints", take_best=take_best)


@pytest.mark.parametrize("name", ["..", ".", "../step-000000001", ""])
def test_a_pointer_leads_to_no_other_folder(saved, name):
    (saved.folder / "LATEST").write_text(f"{name}\n")
    with raises(CheckpointError, saved.folder / "LATEST", "names no checkpoint"):
        latest(saved.folder)


def test_a_half_written_folder_is_no_checkpoint(saved):
    (saved.folder / "step-000000004").mkdir()
    with pytest.raises(CheckpointError, match="nothing to go on from"):
        latest(saved.folder)
    (saved.folder / "LATEST").write_text("step-000000004\n")
    with raises(CheckpointError, "step-000000004", "cannot be read"):
        latest(saved.folder)


def _with_steps(saved, *steps):
    """The folder of the last of these checkpoints."""
    for step in steps:
        saved.checkpoints.save(replace(META, step=step))
        saved.checkpoints.wait()
    return latest(saved.folder)[0]


PART = "rank-00000.safetensors"


def test_a_file_that_changed_or_vanished_is_refused_by_name_with_the_one_before(saved):
    path = _with_steps(saved, 1, 2)
    whole = (path / PART).read_bytes()
    for world in (None, Alone(), Second()):
        (path / PART).write_bytes(whole)
        check(path, world)
        (path / PART).write_bytes(whole[:-1] + b"x")
        with raises(CheckpointError, "step-000000002", PART, "damaged", "step-000000001", "LATEST"):
            check(path, world)
    (path / PART).unlink()
    with raises(CheckpointError, PART, "No such file"):
        check(path)


def test_a_checkpoint_names_other_software():
    text = META.other_software()
    assert text is not None
    assert_names(text, "torch 1.0", "here 2")
    assert replace(META, software={}).other_software() is None


@pytest.mark.parametrize(
    ("step", "loader", "steps", "in_all"),
    [
        (14, {"epoch": 2, "step": 0}, 7, 21),
        (20, {"epoch": 2, "step": 6}, 7, 21),  # on the version it was saved on
        (14, {}, 11, 25),
    ],
)  # a larger one was taken up
def test_a_run_has_the_steps_it_made_and_those_of_the_epochs_left(step, loader, steps, in_all):
    assert replace(META, step=step, epoch=2, loader=loader).steps_in_all(steps, 3) == in_all
