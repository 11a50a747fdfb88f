"""`RowPlacement`: gives each row its split, its file and its sort key, and collects sketches of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.apply.features import Features, FileAssignment
from sluice.etl.ops.hashing import hash_rows, mix
from sluice.etl.spec.row_identity import Identity
from sluice.etl.spec.row_split import Keys, fold_keys, hash_of, row_keys, split_of, whole_rows
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.sketch import Gathered, HashBounds, gather


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchInputs:
    """The values of each written row that sketches need."""

    rules: tuple[Identity, ...]
    """The rules to sketch by; the first is that of the rows' keys."""
    bounds: HashBounds

    @classmethod
    def of(cls, placement: FileAssignment, rows: int, before: Identity | None) -> SketchInputs:
        """Returns the inputs for the sketches of a job with about `rows` rows: by this table's rule, and also by the
        rule `before`, if that is another one."""
        spec = placement.spec
        rules = [
            spec.rule,
            *([before] if before and before.recognition != spec.rule.recognition else []),
        ]
        return cls(rules=tuple(rules), bounds=HashBounds.of(rows, spec.table.split))

    def at(
        self, split: npt.NDArray[np.int32], columns: Mapping[str, pa.Array], keys: Keys
    ) -> Gathered:
        found: Gathered = {}
        for number, rule in enumerate(self.rules):
            as_keys = number == 0 and rule.recognised == rule.columns
            hashes = keys if as_keys else hash_of(columns, rule.recognised, rule.seed)
            for place, name in enumerate(self.bounds.below):
                if len(small := self.bounds.smallest(name, hashes[split == place])):
                    found[rule.recognition, name] = small
        return found


class RowPlacement:
    """Makes the table's rows of one batch of a job after another, and places them."""

    def __init__(
        self, placement: FileAssignment, look: SketchInputs, features: Features, state: FittedState
    ) -> None:
        self._placement = placement
        self._look = look
        self._features = features
        self._drawn_from = state["rows/negatives/0"] if placement.spec.rows.negatives else None
        self._made = [column.name for column in placement.spec.columns]
        ties = ["_row"] if placement.has_ties else []
        self._names = [*self._made, *placement.sorted_by, *ties, "_key"]
        self.seen: Gathered = {}
        """The values that the sketches have collected so far."""

    def finish(
        self, columns: Mapping[str, pa.Array], keys: Keys
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int32], int]:
        """Returns the finished rows, with drawn negatives, and the number of each row's file. Rows that must not be
        published are left out. The third result counts them, too.

        A file's rows are sorted by `_first` and `_then`, if the batch has them, then by `_key` and `_row`."""
        spec, placement = self._placement.spec, self._placement
        split, folds = split_of(columns, keys, spec), fold_keys(columns, keys, spec)
        if spec.rows.negatives:
            columns, origin = spec.rows.negatives.drawn(columns, spec.label, keys, self._drawn_from)
            # What is drawn for a row reveals that row's label, so both lie in one split and one fold.
            keys = row_keys(columns, spec)
            split, folds = split[origin], folds[origin]
        files, order = placement.place(self._features, columns, keys, split)
        in_file = keys
        if placement.has_ties:
            order.append(pa.array(whole_rows(columns).view(np.int64)))
        elif spec.rule.without(spec.label) == spec.rule.columns:
            # Rows with one key that differ only in their labels would share one number.
            in_file = mix(keys ^ hash_rows([columns[spec.label]], 0))
        order.append(pa.array(in_file.view(np.int64)))
        extras = self._features.extras(columns, keys, split, folds)
        made = self._features.apply(columns, extras)
        batch, count = pa.record_batch([*made, *order], self._names), len(keys)
        named = dict(zip(self._made, made, strict=True))
        flags = self._features.rejected_after_learning(columns, extras, named)
        if flags:
            good = ~np.any(list(flags.values()), axis=0)
            batch = batch.filter(pa.array(good))
            columns = {name: values.filter(pa.array(good)) for name, values in columns.items()}
            keys, split, files = keys[good], split[good], files[good]
        gather(self.seen, self._look.at(split, columns, keys))
        return batch, files, count
