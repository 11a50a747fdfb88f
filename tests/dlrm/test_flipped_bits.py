"""Each bit of a run's checkpoints, flipped: what reads them gets the same values, or an error that names the file."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.dlrm.checkpoint.meta import BEST, EVALUATED, LATEST, META, check
from tests.dlrm.rig import META as FIRST
from tests.dlrm.rig import written
from tests.product import (
    Checkpoint,
    CheckpointError,
    best,
    complete_checkpoints,
    find_checkpoint,
    is_evaluated,
    latest,
    mark_best,
    mark_evaluated,
)
from tests.raises import assert_names, raises

DRAWN = 600
"""Flips of each file. Of a smaller file, all bits are flipped."""
FILES = (LATEST, BEST, EVALUATED, META, "layout.json", "rank-00000.safetensors")


@pytest.fixture
def folder(tmp_path):
    """Three checkpoints of a run, of which the last is the newest and the best, and is evaluated."""
    for step in (20, 40, 60):
        meta = replace(
            FIRST,
            config={"batch_size": 80, "seed": 3, "optim": {"lr": 0.05}},
            step=step,
            epoch=step // 20,
            rows=80 * step,
            loader={"epoch": step // 20, "step": 0, "seed": 3},
            knobs={"workers": {"decode": 4}, "prefetch_bytes": 2**25},
        )
        path = tmp_path / f"step-{step:09d}"
        written({"model.weight": torch.full((3,), float(step))}, path, meta)
    mark_best(path, 0.8125)
    mark_evaluated(path)
    return tmp_path


def without_sums(folder: Path) -> None:
    """Writes meta.json and the pointers as version 0.3 did."""
    for path in (*folder.glob(f"*/{META}"), *(folder / name for name in (LATEST, BEST))):
        text = path.read_text()
        if path.name == META:
            values = json.loads(text)
            del values["crc32"]
            path.write_text(json.dumps(values, indent=1))
        else:
            path.write_text(text.rpartition(" ")[0] + "\n")
    (folder / EVALUATED).unlink()


def taken(folder):
    """What a resume, an evaluation and a server take from a run's checkpoints."""
    path, meta = latest(folder)
    marked = best(folder)
    evaluated = is_evaluated(path)
    find_checkpoint(folder, take_best=True)
    check(path)
    weight = Checkpoint(path).tensors(["model.weight"])["model.weight"]
    return path, meta, marked, evaluated, weight.tolist()


def flips(path: Path, chance: random.Random):
    """Yields after each flip of a bit, and puts it back."""
    whole = path.read_bytes()
    bits = range(8 * len(whole))
    for bit in bits if len(bits) <= DRAWN else chance.sample(bits, DRAWN):
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        yield bit
    path.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_by_the_name_of_its_file_or_changes_nothing(folder, name):
    whole = taken(folder)
    path = next(place for place in (folder / name, whole[0] / name) if place.exists())
    refused = 0
    for bit in flips(path, random.Random(name)):
        try:
            assert taken(folder) == whole, bit
        except CheckpointError as error:
            refused += 1
            # If the name in a pointer is no name of a folder any more, the error names that folder.
            assert_names(str(error), name if name in str(error) else folder / "step-", "it")
    assert refused > 0.9 * min(DRAWN, 8 * path.stat().st_size)


def test_a_damaged_meta_does_not_remove_newer_checkpoints(folder):
    """Nor does it decide the number of the next save."""
    meta = folder / "step-000000020" / META
    for _ in flips(meta, random.Random(1)):
        names = list(complete_checkpoints(folder))
        assert names[-2:] == ["step-000000040", "step-000000060"]


def test_a_checkpoint_of_an_earlier_version_is_read_and_checked_against_itself(folder):
    whole = taken(folder)
    without_sums(folder)
    assert taken(folder) == (*whole[:3], False, whole[4])
    path = whole[0] / META
    text = path.read_text()
    for old, new in (
        ('"step": 60', '"step": 61'),
        ('"epoch": 3,\n "rows"', '"epoch": 2,\n "rows"'),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with raises(CheckpointError, META, "not", "write step-000000040"):
            latest(folder)
    path.write_text(text)
    (folder / BEST).write_text("step-000000060 8.8125\n")
    with raises(CheckpointError, BEST, "AUC"):
        best(folder)
