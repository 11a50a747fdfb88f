"""`RowPlacement`: gives each row its split, its file and its sort key, and collects sketches of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.apply.features import Features, FileAssignment
from sluice.etl.ops.hashing import hash_rows, mix
from sluice.etl.spec.row_identity import Identity
from sluice.etl.spec.row_split import Keys, fold_keys, hash_of, row_keys, whole_rows
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.sketch import Gathered, HashBounds, gather


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with the drawn negatives, and where they go."""

    columns: Mapping[str, pa.Array]
    keys: Keys
    folds: Keys
    """The keys that decide the rows' folds: see `sluice.etl.spec.row_split.fold_keys`."""
    split: npt.NDArray[np.int32]
    files: npt.NDArray[np.int32]
    order: list[pa.Array]
    """The columns by which rows are sorted in their file: see `RowPlacement.order`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchInputs:
    """The values of each written row that sketches need."""

    rules: tuple[Identity, ...]
    """The rules to sketch by; the first is that of the rows' keys."""
    bounds: HashBounds
    splits: tuple[str, ...]

    @classmethod
    def of(cls, placement: FileAssignment, rows: int, before: Identity | None) -> SketchInputs:
        """Returns the inputs for the sketches of a job with about `rows` rows: by this table's rule, and also by the
        rule `before`, if that is another one."""
        spec = placement.spec
        rules = [
            spec.rule,
            *([before] if before and before.recognition != spec.rule.recognition else []),
        ]
        return cls(
            rules=tuple(rules),
            bounds=HashBounds.of(rows, spec.table.split),
            splits=tuple(spec.table.split),
        )

    def at(
        self, split: npt.NDArray[np.int32], columns: Mapping[str, pa.Array], keys: Keys
    ) -> Gathered:
        found: Gathered = {}
        for number, rule in enumerate(self.rules):
            as_keys = number == 0 and rule.recognised == rule.columns
            hashes = keys if as_keys else hash_of(columns, rule.recognised, rule.seed)
            for place, name in enumerate(self.splits):
                if len(small := self.bounds.smallest(name, hashes[split == place])):
                    found[rule.recognition, name] = small
        return found


class RowPlacement:
    """Places one batch of a job's rows after another."""

    def __init__(
        self, placement: FileAssignment, look: SketchInputs, features: Features, state: FittedState
    ) -> None:
        self._placement = placement
        self._look = look
        self._features = features
        self._spec = placement.spec
        self._drawn_from = state["rows/negatives/0"] if self._spec.rows.negatives else None
        self.seen: Gathered = {}
        """The values that the sketches have collected so far."""

    def of(self, columns: dict[str, pa.Array], keys: Keys | None) -> Rows:
        spec, placement = self._spec, self._placement
        keys = row_keys(columns, spec) if keys is None else keys
        split, folds = placement.split(keys, columns), fold_keys(columns, keys, spec)
        if spec.rows.negatives:
            columns, origin = spec.rows.negatives.drawn(columns, spec.label, keys, self._drawn_from)
            # What is drawn for a row reveals that row's label, so both lie in one split and one fold.
            keys = row_keys(columns, spec)
            split, folds = split[origin], folds[origin]
        files, first = placement.place(self._features, columns, keys, split)
        order = [
            *first,
            *([pa.array(whole_rows(columns).view(np.int64))] if placement.has_ties else []),
            pa.array(self._order_in_file(columns, keys).view(np.int64)),
        ]
        return Rows(columns, keys, folds, split, files, order)

    def _order_in_file(self, columns: Mapping[str, pa.Array], keys: Keys) -> Keys:
        """Returns the sort keys of rows in their file. Rows with one key that differ only in their labels share one
        number."""
        if (
            self._placement.has_ties
            or self._spec.rule.without(self._spec.label) != self._spec.rule.columns
        ):
            return keys
        return mix(keys ^ hash_rows([columns[self._spec.label]], 0))

    def fit(
        self, rows: Rows, made: Sequence[pa.Array], names: Sequence[str]
    ) -> tuple[Rows, list[pa.Array]]:
        """Returns the rows that may be published, and their columns of these names as `made`. Sketches collect only
        these rows."""
        flags = self._features.rejected_after_learning(
            rows.columns,
            rows.keys,
            rows.split,
            rows.folds,
            made=dict(zip(names, made, strict=True)),
        )
        if flags:
            good = ~np.any(list(flags.values()), axis=0)
            kept = pa.array(good)
            rows = Rows(
                {name: values.filter(kept) for name, values in rows.columns.items()},
                rows.keys[good],
                rows.folds[good],
                rows.split[good],
                rows.files[good],
                [values.filter(kept) for values in rows.order],
            )
            made = [values.filter(kept) for values in made]
        gather(self.seen, self._look.at(rows.split, rows.columns, rows.keys))
        return rows, list(made)

    @staticmethod
    def order(placement: FileAssignment) -> list[str]:
        """Returns the names of `Rows.order`: rows are sorted by `_first` and `_then`, if they are there, then by `_key`
        and `_row`."""
        return [
            *placement.sorted_by,
            *(["_row"] if placement.has_ties else []),
            "_key",
        ]
