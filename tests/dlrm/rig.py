"""Parts for the trainer's tests: batches without a loader, and processes under torchrun."""

import json
import os
import subprocess
import sys
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.dlrm.checkpoint.checkpoint import pieces_of
from sluice.dlrm.ranks import packed
from tests.product import (
    LAYOUT,
    CheckpointDisk,
    CheckpointMeta,
    latest,
    layout_of,
    read_lines,
    unpacked,
    write_pieces,
)

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"big": 4000, "mid": 300, "small": 7, "tiny": 3}
DENSE = ["d0", "d1", "d2"]
META = CheckpointMeta(
    config={}, version=0, fingerprint={}, columns=SIZES, dense=tuple(DENSE), trained={}
)
SMALL_MODEL = tuple(["--width", "8", "--dense-layers", "16", "--over-layers", "16"])
"""A model whose training takes next to no time."""
SMALL = {"width": 8, "dense_layers": (8,), "over_layers": (8,)}
"""The settings of such a model."""
KINDS = ("auto", "row", "table", "column", "data")


torchrec_warns = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
"""A mark of tests that make a sharded model in their own process (`sluice.dlrm.telemetry.silence_warnings`)."""


class Alone:
    """The world of one rank, without a process group."""

    first, device, saving = True, torch.device("cpu"), None
    rank, ranks, local_ranks, host = 0, 1, 1, 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def gather_objects(self, value: Any, _group: object = None) -> list[Any]:
        return [unpacked(packed(value))]


def kinds(ranks: int) -> tuple[str, ...]:
    """The ways of placing tables that are tried on so many ranks."""
    return KINDS if ranks < 4 else ("column", "data")


@dataclass
class FakeBatch:
    """What the trainer uses of a loader's batch."""

    dense: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor
    rows: int
    epoch: int = 0
    step: int = 0


def batch(step: int, rows: int, rank: int = 0, ranks: int = 1) -> FakeBatch:
    """Rank's part of global batch `step`: the same rows for any number of ranks. Labels follow from the ids."""
    g = torch.Generator().manual_seed(step)
    dense = torch.rand(len(DENSE), rows, generator=g)
    ids = torch.stack([torch.randint(0, n, (rows,), generator=g) for n in SIZES.values()])
    score = dense[0] * 2 - 1 + (ids[0] % 3 == 0) * 2.0 - (ids[-1] % 2) * 1.0
    label = (torch.rand(rows, generator=g) < torch.sigmoid(score)).float()
    part = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    ids = ids[:, part].contiguous()
    return FakeBatch(
        dense=dense[:, part].contiguous().T,
        values=ids.reshape(-1).int(),
        lengths=torch.ones(ids.numel(), dtype=torch.int32),
        label=label[part],
        weight=torch.ones(ids.shape[1]),
        rows=ids.shape[1],
        step=step,
    )


def bagged(b: FakeBatch, step: int, rank: int = 0, ranks: int = 1) -> FakeBatch:
    """A batch whose column `small` has bags of 0 to 3 ids instead, the same rows for any number of ranks."""
    g, rows = torch.Generator().manual_seed(step + 99), len(b.label)
    counts = torch.randint(0, 4, (rows * ranks,), generator=g)
    ids = (
        torch.randint(0, SIZES["small"], (int(counts.sum()),), generator=g)
        .int()
        .split(counts.tolist())
    )
    mine = slice(rank * rows, (rank + 1) * rows)
    columns, lengths = list(b.values.split(rows)), b.lengths.view(len(SIZES), rows).clone()
    columns[2], lengths[2] = torch.cat(ids[mine]), counts[mine]
    return replace(b, values=torch.cat(columns), lengths=lengths.flatten())


@dataclass
class FakeFeed:
    """Batches of an epoch, counted like a loader's."""

    steps: int
    rows: int
    rank: int = 0
    ranks: int = 1
    bags: bool = False
    order_hash = ""
    resting = nullcontext
    position: dict[str, Any] = field(default_factory=lambda: {"epoch": 0, "step": 0})

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        epoch = self.position["epoch"]
        for step in range(self.position["step"], self.steps):
            self.position = {"epoch": epoch, "step": step + 1}
            number = epoch * 1000 + step
            drawn = batch(number, self.rows, self.rank, self.ranks)
            yield bagged(drawn, number, self.rank, self.ranks) if self.bags else drawn
        self.position = {"epoch": epoch + 1, "step": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.position)


REAL = 20
"""The number of real rows of the last batch of a `PaddedFeed`."""


@dataclass
class PaddedFeed(FakeFeed):
    """Its last global batch has only the first REAL rows of what would be its rows. In the others lies what a transform
    might make of nothing: numbers that are none, ids, labels."""

    def __iter__(self):
        mine = max(0, min(self.rows // self.ranks, REAL - self.rank * self.rows // self.ranks))
        for whole in super().__iter__():
            real = torch.arange(len(whole.label)) < mine
            yield (
                whole
                if self.position["step"] < self.steps
                else replace(
                    whole,
                    rows=mine,
                    weight=real.float(),
                    label=whole.label.where(real, 1.0),
                    dense=whole.dense.where(real.unsqueeze(1), torch.nan),
                )
            )


def real_rows(b: FakeBatch, rows: int) -> FakeBatch:
    """The first rows of a batch, as if there were no others."""
    lengths = b.lengths.view(-1, len(b.label))
    ids = b.values.split(lengths.flatten().tolist())
    kept = [id for column in range(len(lengths)) for id in ids[column * len(b.label) :][:rows]]
    return replace(
        b,
        dense=b.dense[:rows],
        values=torch.cat(kept),
        lengths=lengths[:, :rows].flatten(),
        label=b.label[:rows],
        weight=b.weight[:rows],
        rows=rows,
    )


@dataclass
class FakeSplit:
    """Batches to evaluate on, named like a loader's."""

    batches: list[FakeBatch]
    dense_names: tuple[str, ...] = tuple(DENSE)
    sparse_names: tuple[str, ...] = tuple(SIZES)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def place_of(self, *_: int) -> str:
        return ""


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def written(tensors: dict[str, torch.Tensor], path: Path, meta: CheckpointMeta) -> None:
    """A checkpoint of these tensors, as one rank writes it."""
    path.mkdir(parents=True)
    pieces = [piece for item in tensors.items() for piece in pieces_of(*item)]
    stored = write_pieces(CheckpointDisk(), path, "rank-00000.safetensors", pieces)
    layout = layout_of([stored], {})
    (path / LAYOUT).write_bytes(layout)
    meta.write(path, {stored["file"]: stored["sum"], LAYOUT: zlib.crc32(layout)}, CheckpointDisk())


def run_words(
    folder: Path, *more: object, run: str | Path = "run", data: str | Path = ""
) -> list[object]:
    """The words of a run of a small model on the folder's table, or on other `data`. The run is in the same folder,
    unless its path is given. A text of `more` may be several words."""
    words = [word for part in more for word in str(part).split()]
    return ["--data", data or folder / "table", "--run-dir", folder / run, *SMALL_MODEL, *words]


def logged(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a kind in a run's log."""
    lines = [line for name in ("events", "metrics") for line in read_lines(run / f"{name}.jsonl")]
    return [line for line in lines if line["kind"] == kind]


def meta_of(run: Path) -> tuple[Path, dict[str, Any]]:
    """The meta.json of a run's newest checkpoint, and what it holds apart from its checksum."""
    path = latest(run / "checkpoints")[0] / "meta.json"
    values = json.loads(path.read_text())
    del values["crc32"]
    return path, values


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in logged(run, "train")]


def launch(
    ranks: int, *words: object, tmp: Path, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """`-m …` under torchrun, or as one process without it if `ranks` is 0."""
    return subprocess.run(
        command(ranks, *words),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(tmp),
        timeout=timeout,
        check=False,
    )


def command(ranks: int, *words: object) -> list[str]:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    return [*(torchrun if ranks else [sys.executable]), "-m", *map(str, words)]


def environment(tmp: Path) -> dict[str, str]:
    """torchrun's own files go to the test's folder; one thread a rank, so that two ranks fit two cores."""
    return {**os.environ, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
