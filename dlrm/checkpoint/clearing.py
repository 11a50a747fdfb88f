"""`clear_run`: clears rows of embeddings in all checkpoints of a run, with their optimiser's state, and removes its
predictions.

Each checkpoint is written anew next to the old one. Then LATEST and BEST change, and the old one is removed. So a kill
leaves a run that can be resumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.common.errors import UsageError
from sluice.dlrm.checkpoint.checkpoint import Checkpoint, TensorPart, write_pieces
from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.dlrm.checkpoint.meta import (
    BEST,
    EVALUATED,
    LATEST,
    META,
    CheckpointMeta,
    check,
    complete_checkpoints,
    read,
    read_pointer,
    write_pointer,
)
from sluice.dlrm.checkpoint.saving import make_folder, put_layout
from sluice.dlrm.model.spread_rows import spread_rows, table_name
from sluice.dlrm.options import Config
from sluice.etl.table.table import FeatureTable

_TENSORS = ".safetensors"


def clear_run(
    run: Path, ids: Mapping[str, int], table: FeatureTable, before: int, value: str
) -> dict[str, list[str]]:
    """Clears the rows in all checkpoints, and removes predictions. Returns which ones, and the other files in which the
    value stands."""
    checkpoints = clear_checkpoints(run, ids, table, before)
    predictions = sorted(run.rglob("*.parquet"))
    for path in predictions:
        path.unlink()
    forms = {value, json.dumps(value)[1:-1]}
    word = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, forms))})(?!\w)".encode())
    others = (path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix != _TENSORS)
    return {
        "checkpoints": checkpoints,
        "predictions": [str(path.relative_to(run)) for path in predictions],
        "named_in": [
            str(path.relative_to(run)) for path in others if word.search(path.read_bytes())
        ],
    }


def clear_checkpoints(
    run: Path, ids: Mapping[str, int], table: FeatureTable, before: int
) -> list[str]:
    """Clears a row for each column in `ids`. Checkpoints of version `before` then belong to the table's version, in
    which all other values have the same ids. Returns the checkpoints that it replaced or removed. Raises UsageError if
    LATEST or BEST names a checkpoint of another version."""
    folder, files = run / "checkpoints", CheckpointDisk()
    pointers = [folder / name for name in (LATEST, BEST, EVALUATED) if (folder / name).exists()]
    named = {read_pointer(pointer)[0] for pointer in pointers}
    changed = []
    for name in complete_checkpoints(folder):
        meta = read(folder / name)
        if meta.version in (before, table.version):
            check(folder / name)
            stored = Checkpoint(folder / name)
            tensors = stored.tensors(stored.sizes)
            rows = list(_rows(tensors, stored, meta, ids))
            if meta.version == table.version and not any(map(torch.any, rows)):
                continue
            for row in rows:
                row.zero_()
            if meta.version != table.version:
                config = {**meta.config, "version": table.version}
                meta = replace(meta.following(table, config), saved=meta.saved)
            new = _write(folder, tensors, stored.values, meta, files)
            for pointer in pointers:
                first, *more = read_pointer(pointer)
                if first == name:
                    write_pointer(pointer, [new, *more], files)
        elif name in named:
            raise UsageError(
                f"{folder / name}: is of version {meta.version}, and the table is at {table.version}; continue the run "
                "there with --resume --follow epochs and run this again, or leave out --run and train anew"
            )
        files.clear(folder / name, META)
        changed.append(name)
    return changed


def _rows(
    tensors: Mapping[str, Tensor], stored: Checkpoint, meta: CheckpointMeta, ids: Mapping[str, int]
) -> Iterator[Tensor]:
    """Yields the rows of the columns' tables, and those of their optimiser's states."""
    spread = Config.from_dict(meta.config).model.spread
    for column, number in ids.items():
        for name in (table_name(column), f"{column}@wide"):
            keys = [key for key in tensors if f".embedding_bags.{name}.weight" in key]
            if keys and number < (height := stored.rows(name)):
                row = int(spread_rows(torch.tensor(number), height)) if column in spread else number
                # A state may be cut by columns: it then has a number for each row in each part.
                yield from (tensors[key][row::height] for key in keys if tensors[key].dim())


def _write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    meta: CheckpointMeta,
    files: CheckpointDisk,
) -> str:
    """Writes a checkpoint. Returns the name of its folder."""
    path = make_folder(folder, meta.step, files)
    pieces = (
        TensorPart(key, value, (0,) * value.dim(), value.shape) for key, value in tensors.items()
    )
    written = write_pieces(files, path, f"rank-00000{_TENSORS}", pieces)
    replace(meta, sums=put_layout(path, [written], values, files)).put(path, files)
    return path.name
