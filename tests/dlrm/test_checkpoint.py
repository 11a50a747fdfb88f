"""Which checkpoints stay, and what is left when one cannot be written. Nothing here is sharded: see test_ranks.py."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from dlrm import checkpoint
from dlrm.checkpoint import Checkpoints
from dlrm.meta import META as NAME
from dlrm.meta import CheckpointError, Meta, best, check, chosen, damage, latest, mark_best

META = Meta(config={}, version=0, fingerprint={}, columns={}, dense=(), software={"torch": "1.0"})


class Alone:
    """The world of one rank, without a process group."""

    first, device, saving = True, torch.device("cpu"), None
    rank, ranks = 0, 1

    def barrier(self) -> None: ...

    def gather_objects(self, value):
        return [value]


class Second:
    """Of two ranks; the first found nothing wrong with its part."""

    rank, ranks = 1, 2

    def gather_objects(self, value):
        return [[], value]


class Weights:
    def __init__(self, value: float) -> None:
        self.tensor = torch.full((3,), value)

    def state_dict(self):
        return {"weight": self.tensor}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Checkpoints of one number; it is written as JSON, into a full disk if `room` is False."""
    weights = Weights(1.0)
    room = SimpleNamespace(left=True)

    def write(state, checkpoint_id, process_group):
        checkpoint_id.mkdir(parents=True)
        (checkpoint_id / "half").write_text("x")
        if not room.left:
            full = OSError(errno.ENOSPC, "No space left on device")
            raise CheckpointException("write", {0: (full, None)})  # as the library tells it: no Exception
        (checkpoint_id / "weight").write_text(json.dumps(state["model"]["weight"].tolist()))

    monkeypatch.setattr(checkpoint, "save_parts", write)
    nothing = Weights(0.0)
    parts = SimpleNamespace(model=SimpleNamespace(state_dict=weights.state_dict, fused_optimizer=nothing),
                            dense=nothing)
    lines = []
    found = Checkpoints(tmp_path, parts, Alone(), keep=2, record=lines.append)  # type: ignore[arg-type]
    yield SimpleNamespace(checkpoints=found, folder=tmp_path, weights=weights, room=room, lines=lines)
    found.close()


def steps(folder):
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("step-*"))


def test_what_is_saved_is_the_state_at_the_call_though_training_goes_on(saved):
    saved.checkpoints.save(replace(META, step=1))
    saved.weights.tensor.fill_(9.0)
    saved.checkpoints.wait()
    path, meta = latest(saved.folder)
    assert json.loads((path / "weight").read_text()) == [1.0] * 3
    assert meta.step == 1
    assert saved.lines[0]["path"] == path.name


def test_the_newest_and_the_best_stay(saved):
    for step in range(1, 7):
        saved.checkpoints.save(replace(META, step=step))
        saved.checkpoints.wait()
        if step == 2:
            mark_best(saved.folder / "step-000000002", 0.75)
    assert steps(saved.folder) == [2, 5, 6]
    assert best(saved.folder) == (saved.folder / "step-000000002", 0.75)
    assert latest(saved.folder)[1].step == 6


def test_a_full_disk_is_an_error_that_leaves_the_one_before(saved):
    saved.checkpoints.save(replace(META, step=1))
    saved.checkpoints.wait()
    saved.room.left = False
    saved.checkpoints.save(replace(META, step=2))
    with pytest.raises(CheckpointError, match=r"step-000000002 could not be written \(OSError: .*No space left"):
        saved.checkpoints.wait()
    assert steps(saved.folder) == [1]
    assert latest(saved.folder)[1].step == 1
    saved.room.left = True
    saved.checkpoints.save(replace(META, step=3))
    saved.checkpoints.wait()
    assert latest(saved.folder)[1].step == 3


def test_a_run_that_does_not_exist_is_told_from_one_without_a_checkpoint(tmp_path):
    for take_best in (False, True):
        with pytest.raises(CheckpointError, match="nope does not exist: name a run folder"):
            chosen(tmp_path / "nope" / "checkpoints", take_best=take_best)


def test_a_half_written_folder_is_no_checkpoint(saved):
    (saved.folder / "step-000000004").mkdir()
    with pytest.raises(CheckpointError, match="nothing to go on from"):
        latest(saved.folder)
    (saved.folder / "LATEST").write_text("step-000000004\n")
    with pytest.raises(CheckpointError, match="step-000000004 cannot be read"):
        latest(saved.folder)


def _with_steps(saved, *steps):
    """The folder of the last of these checkpoints."""
    for step in steps:
        saved.checkpoints.save(replace(META, step=step))
        saved.checkpoints.wait()
    return latest(saved.folder)[0]


def test_a_file_that_changed_or_vanished_is_refused_by_name_with_the_one_before(saved):
    path = _with_steps(saved, 1, 2)
    for look in (check, lambda p: checkpoint.check(p, Alone()), lambda p: checkpoint.check(p, Second())):
        (path / "weight").write_text("[1.0, 1.0, 1.0]")
        look(path)
        (path / "weight").write_text("[1.0, 1.0, 9.0]")
        with pytest.raises(CheckpointError, match=r"step-000000002 is damaged: weight is not as it was written .*"
                                                  r"write step-000000001 into .*LATEST"):
            look(path)
    (path / "weight").unlink()
    with pytest.raises(CheckpointError, match=r"weight cannot be read \(No such file"):
        check(path)


def test_the_ranks_look_at_every_file_between_them(saved):
    path = _with_steps(saved, 1)
    for file in ("half", "weight"):
        (path / file).write_text("spoilt")
    parts = [damage(path, rank=rank, ranks=3) for rank in range(3)]
    assert [[text.split()[0] for text in part] for part in parts] == [["half"], ["weight"], []]
    with pytest.raises(CheckpointError, match=r"half is not .*; weight is not .*copy it here anew; there is no other"):
        check(path)


def test_a_checkpoint_from_before_there_were_checksums_is_taken_as_it_is(saved):
    path = _with_steps(saved, 1)
    values = json.loads((path / NAME).read_text())
    assert sorted(values.pop("sums")) == ["half", "weight"]
    (path / NAME).write_text(json.dumps(values))
    (path / "weight").write_text("spoilt")
    check(path)


def test_other_software_is_told():
    text = META.other_software()
    assert text is not None
    assert text.startswith("the checkpoint was written with torch 1.0 (here 2.")
    assert Meta(config={}, version=0, fingerprint={}, columns={}, dense=()).other_software() is None


@pytest.mark.parametrize(("step", "loader", "steps", "in_all"), [
    (14, {"epoch": 2, "step": 0}, 7, 21), (20, {"epoch": 2, "step": 6}, 7, 21),  # on the version it was saved on
    (14, {}, 11, 25)])  # a larger one was taken up
def test_a_run_has_the_steps_it_made_and_those_of_the_epochs_left(step, loader, steps, in_all):
    assert replace(META, step=step, epoch=2, loader=loader).steps_in_all(steps, 3) == in_all
