"""What the ranks of `tests.dlrm.elastic_ranks` trained, over all starts of a run: each row of the epoch once."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from benchmarks.small_table import small_table
from tests.dlrm.rig import logged
from tests.product import read_lines

ROWS, BATCH, SAVED = 3200, 64, 10
STEPS = ROWS * 8 // 10 // BATCH
TRAIN = (
    f"--batch-size {BATCH} --save-every {SAVED} --log-every 1 --width 4 --dense-layers 8 --over-layers 8"
).split()


def write(folder: Path, rows: int = ROWS):
    """A table in which each row has its number."""
    (folder / "log").mkdir()
    return small_table(
        folder / "table", rows=rows, values=50, files=2, row_group_rows=256, number_rows=True
    )


def starts(table, folder: Path) -> list[int]:
    """The steps at which training began and went on, once each row of the epoch was trained exactly once."""
    lives: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in (folder / "log").glob("*.jsonl"):
        for line in read_lines(path):
            lives[int(path.name.partition("-")[0])][line["step"]] += line["rows"]
    begun = sorted(lives)
    assert all(step % SAVED == 0 for step in begun)
    # Whatever was trained since the last checkpoint went down with the ranks.
    rows = [
        row
        for first, end in pairwise([*begun, STEPS])
        for step in range(first, end)
        for row in lives[first][step]
    ]
    assert len(set(rows)) == len(rows) == STEPS * BATCH
    assert set(rows) <= set(range(table.rows_of("train")))
    assert [event["resumed_at"] for event in logged(folder / "run", "start")] == begun
    return begun


def losses(run: Path) -> dict[int, float]:
    """Step → its loss, as the run wrote it last."""
    return {line["step"]: line["loss"] for line in logged(run, "train")}
