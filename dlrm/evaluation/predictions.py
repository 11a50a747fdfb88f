"""Each row's label and prediction with columns of its table: `RowPredictions` writes them to a file, and measures how
good they are for each value of a column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from sluice.agent.whole_file import replace_file
from sluice.common.errors import UsageError
from sluice.dlrm.evaluation.metrics import quality
from sluice.dlrm.ranks import Ranks
from sluice.ingest.batch import Batch
from sluice.ingest.loader import BatchLoader

MOST_VALUES = 1000
"""The most values of a column for which figures are given."""
_OWN = ("label", "prediction", "weight", "step", "logit")


class PredictionError(UsageError):
    """Predictions that cannot be written or compared. The message names the file or the column."""


class RowPredictions:
    """Collects the rows of an evaluation: `add` takes each batch, and `finish` returns the figures. All ranks call
    both together. The rows stay in memory until the end."""

    def __init__(
        self, feed: BatchLoader, world: Ranks, *, by: Sequence[str], path: Path | None
    ) -> None:
        self._feed, self._world, self._path = feed, world, path
        self._by = tuple(dict.fromkeys(by))
        self._rows: list[pa.Table] = []
        bags = [field.name for field in feed.table.stored if field.role == "id_list"]
        for name in {*_OWN, *bags}.intersection(by):
            raise PredictionError(
                f"--by {name}: it has several values a row, or the name of a column of predictions; name another column"
            )
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise PredictionError(f"--predictions {path}: name a file in a folder that exists")

    def add(self, batch: Batch, logits: torch.Tensor) -> None:
        """Takes the rows of a batch of this rank, and their logits."""
        real = (batch.weight > 0).nonzero().flatten()
        if not len(real):
            return
        chances = torch.sigmoid(logits.double())
        own = (batch.label, chances, batch.weight, torch.full_like(batch.label, batch.step), logits)
        rows = pa.table([part[real].numpy() for part in own], list(_OWN))
        if self._by:
            stored = self._feed.stored_rows(batch.epoch, batch.step, real.tolist(), self._by)
            for name, column in zip(self._by, stored.columns, strict=True):
                is_encoded = pa.types.is_dictionary(column.type)
                rows = rows.append_column(
                    name, column.cast(column.type.value_type) if is_encoded else column
                )
        self._rows.append(rows)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Writes the file. Returns for each column of `by` the figures of each of its values. Only the first rank does
        so, and other ranks return nothing."""
        sink = pa.BufferOutputStream()
        if self._rows:
            own = pa.concat_tables(self._rows, promote_options="permissive")
            with pa.ipc.new_stream(sink, own.schema) as stream:
                stream.write_table(own)
        parts = self._world.gather_objects(np.frombuffer(sink.getvalue(), np.uint8))
        if not self._world.first:
            return {}
        tables = [pa.ipc.open_stream(part.tobytes()).read_all() for part in parts if part.size]
        rows = pa.concat_tables(tables, promote_options="permissive").sort_by("step")
        if self._path is not None:
            self._write(rows.select([*_OWN[:3], *self._by]), self._path)
        return {name: figures_of(rows, name) for name in self._by}

    def _write(self, rows: pa.Table, path: Path) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink)
        try:
            replace_file(path, sink.getvalue().to_pybytes())
        except OSError as error:
            raise PredictionError(
                f"--predictions {path}: cannot be written ({error.strerror}); name another file"
            ) from None


def figures_of(rows: pa.Table, name: str) -> dict[str, Any]:
    """Returns the figures of the rows with each value of a column, in the order of the values."""
    encoded = pc.dictionary_encode(rows[name].combine_chunks(), null_encoding="encode")
    values = encoded.dictionary.to_pylist()
    if len(values) > MOST_VALUES:
        raise PredictionError(
            f"--by {name}: the column has {len(values):,} values, and figures are given for at most {MOST_VALUES:,}; "
            "name another column"
        )
    columns = [rows[part].to_numpy().astype(np.float64) for part in ("logit", "label", "weight")]
    codes = encoded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    places = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    by_value = sorted(range(len(values)), key=lambda n: (values[n] is None, values[n]))
    return {
        str(values[n]): quality(*(column[places[n]] for column in columns)).to_dict()
        for n in by_value
    }
