"""Asks which promises of `sluice.testing` a loader keeps: `python -m benchmarks.peers.promises NAME …`.

Each gets the same 960 numbers, a seed and batches of 32. It is used as its own pages show. Where a loader has workers,
there are two. Peers run in their environments (`bash .ci/peers grain torch`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice import testing

ROWS, BATCH, SEED = 960, 32, 7


def sluice_loader(folder: Path, rank: int = 0, ranks: int = 1) -> Any:
    from sluice import Loader

    roles = "label=y;dense=id"
    options = {"batch_size": BATCH, "seed": SEED, "rank": rank, "ranks": ranks}
    return Loader(str(folder / "*.parquet"), roles=roles, as_="numpy", tuning="fixed", **options)


class GrainLoader:
    """Grain's DataLoader. Its iterator has the state, under names of its own."""

    def __init__(self, rank: int = 0, ranks: int = 1):
        import grain

        self.loader = grain.DataLoader(
            data_source=[{"id": number} for number in range(ROWS)],
            sampler=grain.samplers.IndexSampler(
                ROWS,
                grain.sharding.ShardOptions(rank, ranks),
                shuffle=True,
                num_epochs=1,
                seed=SEED,
            ),
            operations=[grain.transforms.Batch(BATCH, drop_remainder=True)],
        )

    def __iter__(self) -> Iterator[Any]:
        self.batches = iter(self.loader)
        if self.state is not None:
            self.batches.set_state(self.state)
        return self.batches

    state: Any = None

    def state_dict(self) -> Any:
        return self.batches.get_state() if hasattr(self, "batches") else self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def hugging_face(folder: Path, rank: int = 0, ranks: int = 1) -> Any:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node

    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    rows = load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    mixed = split_dataset_by_node(rows.shuffle(seed=SEED, buffer_size=200), rank, ranks)
    return mixed.batch(BATCH)


def litdata(folder: Path, rank: int = 0, ranks: int = 1) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset, index_parquet_dataset
    from litdata.streaming.item_loader import ParquetLoader

    if ranks > 1:
        raise NotImplementedError("not asked: it takes its rank from the environment")
    index_parquet_dataset(str(folder))
    rows = StreamingDataset(
        str(folder), item_loader=ParquetLoader(), shuffle=True, seed=SEED, drop_last=False
    )
    return StreamingDataLoader(
        rows, batch_size=BATCH, num_workers=2, multiprocessing_context="spawn"
    )


LOADERS: dict[str, Callable[..., Any]] = {
    "sluice": sluice_loader,
    "grain": lambda _folder, rank=0, ranks=1: GrainLoader(rank, ranks),
    "hugging face": hugging_face,
    "litdata": litdata,
}


def checks(make: Callable[..., Any]) -> dict[str, Callable[[], None]]:
    once = partial(testing.assert_exactly_once, make, key="id", rows=range(ROWS))
    return {
        "same order": partial(testing.assert_same_order, make),
        "each row once": once,
        "resumes": partial(testing.assert_resumes, make, at=range(0, ROWS // BATCH, 3)),
        "resumes on other ranks": partial(testing.assert_resumes_on, make, key="id", ranks=(1, 2)),
        "even ranks": partial(testing.assert_even_ranks, make, ranks=(1, 2)),
    }


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as work:
        numbers = np.arange(ROWS, dtype=np.int32)
        for part in range(4):
            table = pa.table({"id": numbers[part::4], "y": (numbers[part::4] % 2).astype(np.int8)})
            pq.write_table(table, f"{work}/part-{part}.parquet", row_group_size=60)
        for name in names:
            for check, run in checks(partial(LOADERS[name], Path(work))).items():
                try:
                    run()
                    found = "kept"
                except Exception as error:  # whatever it is, the promise does not hold
                    found = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                print(f"{name}: {check}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(LOADERS))
