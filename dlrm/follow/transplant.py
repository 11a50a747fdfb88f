"""Loads a checkpoint into a model with other columns: `transplant`. Rows, weights and states of kept columns move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sluice.dlrm.checkpoint.checkpoint import (
    Checkpoint,
    TensorPart,
    first_state,
    leaves,
    mean_row_states,
    put_state,
)
from sluice.dlrm.checkpoint.meta import CheckpointError, CheckpointMeta, read
from sluice.dlrm.follow.table_diff import TableDiff
from sluice.dlrm.model.interactions import Labels
from sluice.dlrm.model.local_parts import local_parts
from sluice.dlrm.model.ranker import TableLayout
from sluice.dlrm.model.spread_rows import spread_rows, table_name
from sluice.dlrm.model.towers import tower_of
from sluice.dlrm.options import Config

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts

_TABLES = "embedding_bags."
_TOWER = "tower."


def transplant(
    path: Path,
    parts: TrainingParts,
    *,
    after: CheckpointMeta,
    changes: TableDiff,
) -> None:
    """Fills fresh `parts`, which `after` describes, from the checkpoint in `path`, of a version before. Each rank
    reads what it holds. New columns keep their first values, and the dense layers ignore them until they have learned.
    """
    stored, before = Checkpoint(path), read(path)
    state = first_state(parts)
    layout, columns = parts.layout, columns_of_tables(parts.layout)
    sizes = {table.name: table.rows for table in layout.tables}
    config = Config.from_dict(after.config).model
    # Each weight's labels before and now: the feature of each index. A column that starts again counts as new.
    history = layout.history.name if layout.history is not None else None
    old_columns = [
        name if changes.keeps(name) else f"{name}, before"
        for name in before.columns
        if name != history
    ]
    labels_of = tower_of(config.kind).labels
    old = labels_of(config, before.dense, old_columns)
    new = labels_of(config, after.dense, [column.name for column in layout.kept])
    labels = {name: (old[name], new[name]) for name in new}
    boxes: list[TensorPart] = []
    for key, value, _ in leaves(state):
        if not isinstance(value, Tensor) or key not in stored.sizes:
            continue
        _, is_table, rest = key.partition(_TABLES)
        if not is_table:
            _fill_dense(stored, key, value, labels)
            continue
        name = rest.partition(".weight")[0]
        column = columns[name]
        if column in changes.grown and column in config.spread:
            _fill_spread_table(stored.tensors([key])[key], value, *changes.grown[column])
        elif changes.keeps(column):
            boxes += _rows(stored, key, value, stored.rows(name), sizes[name])
    stored.read(boxes)
    put_state(parts, state)


def columns_of_tables(layout: TableLayout) -> dict[str, str]:
    """Returns for each table the column that it serves."""
    columns = {
        table.name: column.name for column, table in zip(layout.kept, layout.own, strict=True)
    }
    columns |= {table.name: table.name.removesuffix("@wide") for table in layout.wide}
    return columns | (
        {table_name(layout.history.name): layout.history.name} if layout.history else {}
    )


def _rows(
    stored: Checkpoint, key: str, value: Any, rows: int, new_rows: int
) -> Iterator[TensorPart]:
    """Yields this rank's part of the first `rows` rows of a table of `new_rows`, or of its optimiser's state."""
    if not value.dim():  # a count of steps
        yield TensorPart(key, value)
        return
    if value.dim() == 1 and (stored.sizes[key][0] != rows or value.size()[0] != new_rows):
        # The table is, or was, cut by columns.
        stored.fill_row_states(key, value, rows, new_rows)
        return
    for first, part in local_parts(value):
        height = min(len(part), rows - first[0])
        if height > 0:
            yield TensorPart(key, part[:height], first)


def _fill_spread_table(old: Tensor, value: Any, rows: int, new_rows: int) -> None:
    """Fills a spread table, in which an id's row depends on the number of rows. Each row moves to its id's new row."""
    ids = torch.arange(rows)
    old_rows, new_rows_of_ids = (spread_rows(ids, count) for count in (rows, new_rows))
    if old.dim() == 1:
        old = mean_row_states(old, rows)
    for first, part in local_parts(value):
        top = first[0] % new_rows
        on_this_rank = (new_rows_of_ids >= top) & (new_rows_of_ids < top + len(part))
        values = old[old_rows[on_this_rank]]
        if old.dim() == 2:
            values = values[:, first[1] : first[1] + part.shape[1]]
        part[new_rows_of_ids[on_this_rank] - top] = values


def _fill_dense(
    stored: Checkpoint, key: str, value: Tensor, labels: dict[str, tuple[Labels, Labels]]
) -> None:
    """Fills a dense layer's weight, or the optimiser's state of it."""
    name = (
        key.rpartition(_TOWER)[2]
        if key.startswith("model.")
        else key.rpartition(_TOWER)[2].rpartition(".")[0]
    )
    old = stored.tensors([key])[key]
    if name in labels and old.dim():
        old = moved_weights(old, *labels[name])
    if old.shape != value.shape:
        raise CheckpointError(
            f"{key} is {tuple(old.shape)} in the checkpoint, and {tuple(value.shape)} is needed"
        )
    value.copy_(old)


def moved_weights(old: Tensor, before: Labels, after: Labels) -> Tensor:
    """Returns a weight, or its optimiser state, with each value at its feature's new index. Values of new features are
    0, so they do not change the model's answers until they are trained."""
    for dimension, (old_labels, labels) in enumerate(zip(before, after, strict=True)):
        if old_labels is None or labels is None or list(old_labels) == list(labels):
            continue
        old_index = {label: index for index, label in enumerate(old_labels)}
        pairs = [
            (index, old_index[label]) for index, label in enumerate(labels) if label in old_index
        ]
        targets, sources = (
            torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1)
        )
        new = old.new_zeros([*old.shape[:dimension], len(labels), *old.shape[dimension + 1 :]])
        old = new.index_copy_(dimension, targets, old.index_select(dimension, sources))
    return old
