"""Turns raw features into probabilities: `Servable`, a run's model. It uses the code of the ETL and of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sluice.dlrm.checkpoint.checkpoint import Checkpoint
from sluice.dlrm.checkpoint.meta import (
    CheckpointError,
    CheckpointMeta,
    check,
    find_checkpoint,
    read,
)
from sluice.dlrm.model.ranker import Ranker, TableLayout
from sluice.dlrm.options import Config, tables_of
from sluice.dlrm.serving.served_tables import ServedTables
from sluice.etl import ops
from sluice.etl.apply.features import Features
from sluice.etl.apply.lookups import Problems, Serving
from sluice.etl.ops.lists import flat
from sluice.etl.spec.permission import Permission
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.table import FeatureTable
from sluice.ingest.batch import Batch
from sluice.ingest.column_transforms import ColumnTransforms
from sluice.ingest.columns import lengths_name
from sluice.ingest.stages.transform import Arrays

_NO_VALUES = torch.zeros(0)
_TRIAL_ROWS = 256
_CERTAIN_LOGIT = 36.0
"""From this logit on, the probability is exactly 1 in float64."""


@dataclass(frozen=True, kw_only=True)
class Servable:
    """One checkpoint, with the fitted state of the table version that it was trained on."""

    path: Path
    meta: CheckpointMeta
    table: FeatureTable
    layout: TableLayout
    model: Ranker
    rows: Serving
    """The data about other rows that joins and histories need."""
    features: Features
    online: Mapping[str, ops.Online]
    transforms: ColumnTransforms

    @classmethod
    def load(
        cls,
        run: Path,
        *,
        take_best: bool = False,
        allow_code: Permission | Iterable[str] = (),
    ) -> Servable:
        """Loads the newest checkpoint of a run, or the best.

        Raises CheckpointError, TableError or StateError if there is no checkpoint, if it is damaged, if its weights or
        answers are not finite, or if its table's version is gone. Raises OperatorError if the table's spec names a
        function that `allow_code` (names of modules) does not cover."""
        path, meta = find_checkpoint(run / "checkpoints", take_best=take_best)
        config = Config.from_dict(meta.config)
        if config.why_not_served:
            raise CheckpointError(f"{run}: {config.why_not_served}")
        table = FeatureTable.open(
            config.data, meta.version, allow_code=allow_code, transforms=config.transforms
        )
        meta.check(table)
        spec, state = table.spec(), table.state() or FittedState()
        layout = TableLayout(config.model, tables_of(table.fields, config.model))
        check(path)
        model = ranker(config, layout, len(meta.dense), Checkpoint(path))
        if read(path) != meta:
            raise CheckpointError(
                f"checkpoint {path} was replaced by another one while it was loaded; load it again"
            )
        servable = cls(
            path=path,
            meta=meta,
            table=table,
            layout=layout,
            model=model,
            rows=Serving.open(table),
            features=Features(spec, state),
            online=online_of(table, state),
            transforms=ColumnTransforms.of(table),
        )
        servable.try_out()
        return servable

    def try_out(self) -> None:
        """Raises CheckpointError unless the model gives plausible answers to made-up rows, with numbers of 0 and random
        ids. Finite weights can be too large for that."""
        generator = np.random.default_rng(0)
        columns = self.layout.columns
        batch = self._batch(
            np.zeros((len(self.meta.dense), _TRIAL_ROWS), np.float32),
            [generator.integers(0, column.rows, _TRIAL_ROWS) for column in columns],
            [np.ones(_TRIAL_ROWS, np.int32)] * len(columns),
        )
        logits = self._logits(batch)
        if not torch.isfinite(logits).all() or logits.abs().median() > _CERTAIN_LOGIT:
            raise CheckpointError(
                f"checkpoint {self.path} is not served: the model's answers to made-up rows are no numbers, or most "
                "are exactly 0 or 1. So its weights are far too large; train with a lower learning rate, or name an "
                "earlier checkpoint in LATEST"
            )

    def batch(self, columns: Mapping[str, pa.Array], problems: Problems) -> Batch:
        """Turns raw columns into the batch that the loader would make. A number that is too large, or missing and not
        filled, is 0 there, and a problem of its row."""
        inputs = self.features.inputs(self.rows.complete(columns, problems))
        rows = len(next(iter(columns.values())))
        arrays: Arrays = {}
        for name, as_stored in inputs.items():
            values = self.online[name](as_stored) if name in self.online else as_stored
            if isinstance(values, pa.ListArray):
                values, bag_lengths = flat(values)
                arrays[lengths_name(name)] = bag_lengths.astype(np.int32)
            values = np.asarray(values)
            if name in self.meta.dense:
                with np.errstate(over="ignore"):
                    numbers = values.astype(np.float32)
                for row in np.flatnonzero(np.isinf(numbers)).tolist():
                    numbers[row] = 0
                    text = (
                        f"feature {name!r}: the operators of the spec make {values[row]:g} of it, which is too large "
                        "for float32; a job rejects such a row"
                    )
                    problems.setdefault(row, text)
                values = numbers
            arrays[name] = values
        arrays = self.transforms(arrays, rows)
        dense = np.array([arrays[name] for name in self.meta.dense], np.float32).reshape(-1, rows)
        for number, row in np.argwhere(~np.isfinite(dense)).tolist():
            dense[number, row] = 0
            name = self.meta.dense[number]
            text = f"feature {name!r} is missing or no finite number, and the spec fills nothing in"
            problems.setdefault(row, text)
        ids, lengths = [], []
        for column in self.layout.columns:
            column_ids = arrays[column.name]
            if len(column_ids) and not (column_ids.min() >= 0 and column_ids.max() < column.rows):
                raise RuntimeError(
                    f"column {column.name!r}: an id is outside its table of {column.rows} rows"
                )
            ids.append(column_ids)
            lengths.append(arrays.get(lengths_name(column.name), np.ones(rows, np.int32)))
        return self._batch(dense, ids, lengths)

    def _batch(
        self, dense: npt.NDArray[np.float32], ids: Sequence[Any], lengths: Sequence[Any]
    ) -> Batch:
        return Batch(
            dense=torch.from_numpy(dense).t(),
            values=torch.from_numpy(np.concatenate(ids, dtype=np.int64)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
            label=_NO_VALUES,
            weight=_NO_VALUES,
            rows=dense.shape[1],
            epoch=0,
            step=0,
        )

    def probabilities(
        self, columns: Mapping[str, pa.Array], problems: Problems
    ) -> npt.NDArray[np.float64]:
        """Returns the predicted probability of each row. That of a row with a problem says nothing."""
        batch = self.batch(columns, problems)
        logits = self._logits(batch)
        for row in torch.nonzero(~torch.isfinite(logits)).flatten().tolist():
            largest = batch.dense[row].abs()
            name = self.meta.dense[int(largest.argmax())]
            text = f"the model's answer is no number: feature {name!r}, as {float(largest.max()):g}, is too large"
            problems.setdefault(row, text)
        probabilities: npt.NDArray[np.float64] = torch.sigmoid(logits.double()).numpy()
        return probabilities

    def _logits(self, batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(*self.layout.features(batch))
        return logits

    def about(self) -> dict[str, Any]:
        """Returns facts about the model for clients."""
        rows = self.features.spec.rows
        return {
            "checkpoint": self.path.name,
            "step": self.meta.step,
            "epoch": self.meta.epoch,
            "version": self.meta.version,
            "fingerprint": self.meta.fingerprint["layout"],
            "model": self.meta.config["model"]["kind"],
            "tables": self.meta.config["model"]["table_dtype"],
            "table_bytes": self.model.tables.bytes,
            "population": rows.population,
            "kept_negatives": rows.sample.negatives if rows.sample else 1.0,
        }


def online_of(table: FeatureTable, state: FittedState | None) -> dict[str, ops.Online]:
    """Returns the operators that the table leaves to the loader, by column."""
    return {f.name: ops.online(f, state) for f in table.fields if f.online}


def ranker(config: Config, layout: TableLayout, dense: int, weights: Checkpoint) -> Ranker:
    """Makes the unsharded model with a checkpoint's weights."""
    with torch.random.fork_rng():
        model = Ranker(config.model, layout, dense)
    for table in layout.tables:
        if (rows := weights.rows(table.name)) != table.rows:
            raise CheckpointError(
                f"checkpoint {weights.path}: table {table.name!r} has {rows} rows, and its settings {table.rows}"
            )
    model.tables = ServedTables({t.name: weights.table(t.name) for t in layout.tables}, layout.keys)
    try:
        model.tower.load_state_dict(weights.tower())
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint {weights.path} does not fit its settings: {str(error).splitlines()[0]}"
        ) from None
    return model.eval()
