"""`RowPlacement`: gives each row its split, its file and its sort key, and collects sketches of the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sluice.etl.apply.features import Features, FileAssignment
from sluice.etl.apply.input_checks import Part
from sluice.etl.apply.lines import Reasons
from sluice.etl.apply.rejected import NOWHERE, PLACE, describe
from sluice.etl.apply.row_counts import RowCounts
from sluice.etl.ops.base import Arrays
from sluice.etl.ops.hashing import Flags, Narrow, hash_rows, mix
from sluice.etl.spec.row_identity import Identity
from sluice.etl.spec.row_split import Keys, fold_keys, hash_of, row_keys, split_of, whole_rows
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.new_files import NewFile, write_file
from sluice.etl.table.sketch import Gathered, HashBounds, gather
from sluice.etl.table.store import TableStore, folder_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """What a job knows about its rows before it writes them: their files, and the values that sketches need."""

    placement: FileAssignment
    rows: int
    """About the number of all rows."""
    rules: tuple[Identity, ...]
    """The rules to sketch by; the first is that of the rows' keys."""
    bounds: HashBounds

    @classmethod
    def of(cls, spec: Spec, counted: RowCounts, before: Identity | None) -> WritePlan:
        """Returns the plan of a job whose rows were counted. There are sketches by this table's rule, and also by the
        rule `before`, if that is another one."""
        unlabelled = counted.nulls.get(spec.label, 0.0)
        placement = FileAssignment.of(spec, counted.rows, unlabelled)
        rules = [
            spec.rule,
            *([before] if before and before.recognition != spec.rule.recognition else []),
        ]
        bounds = HashBounds.of(counted.rows, spec.table.split)
        return cls(placement=placement, rows=counted.rows, rules=tuple(rules), bounds=bounds)

    def at(self, split: Narrow, columns: Arrays, keys: Keys) -> Gathered:
        gathered: Gathered = {}
        for number, rule in enumerate(self.rules):
            as_keys = number == 0 and rule.recognised == rule.columns
            hashes = keys if as_keys else hash_of(columns, rule.recognised, rule.seed)
            for place, name in enumerate(self.bounds.below):
                if len(small := self.bounds.smallest(name, hashes[split == place])):
                    gathered[rule.recognition, name] = small
        return gathered


def write_rows(
    placement: FileAssignment,
    store: TableStore,
    job: str,
    *,
    file: int,
    pieces: Iterable[pa.Table],
    attempt: int | None = None,
) -> NewFile:
    """Writes the sorted rows of a file, on every engine. `pieces` are its row groups. If several attempts may write it,
    each has a path of its own."""
    spec = placement.spec
    ends = zip(spec.table.split, placement.ends, strict=True)
    split = next(split for split, end in ends if file < end)
    suffix = "" if attempt is None else f"-{attempt}"
    return write_file(
        store,
        f"{folder_of(job)}/split={split}/part-{file:05}{suffix}.parquet",
        pieces,
        spec.fields(),
        split=split,
        speed=spec.table.layout == "speed",
        buckets=spec.buckets,
    )


class RowPlacement:
    """Makes the table's rows of one batch of a job after another, and places them."""

    def __init__(self, plan: WritePlan, features: Features, state: FittedState) -> None:
        self._plan, placement = plan, plan.placement
        self._features = features
        self._drawn_from = state["rows/negatives/0"] if placement.spec.rows.negatives else None
        ties = ["_row"] if placement.has_ties else []
        self._order = [*placement.sorted_by, *ties, "_key"]
        self.seen: Gathered = {}
        """The values that the sketches have collected so far."""
        self.late: dict[Part, Reasons] = defaultdict(dict)
        """For each part of the input, the lines of rows that were rejected here, with the reasons."""
        self.rejected: list[pa.RecordBatch] = []
        """Rows that were rejected here and have no place in the input, as `REJECTS`."""

    def finish(self, columns: Arrays, keys: Keys) -> tuple[pa.RecordBatch, Narrow, int]:
        """Returns the finished rows, with drawn negatives, and the number of each row's file. Rows that must not be
        published are left out. The third result counts them, too.

        A file's rows are sorted by `_first` and `_then`, if the batch has them, then by `_key` and `_row`."""
        spec, placement = self._plan.placement.spec, self._plan.placement
        given = columns
        columns = {name: values for name, values in columns.items() if name not in PLACE}
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
        batch = pa.record_batch(made | dict(zip(self._order, order, strict=True)))
        count = len(keys)
        flags = self._features.rejected_after_learning(columns, extras, made)
        if flags:
            self._reject(given, flags)
            good = ~np.any(list(flags.values()), axis=0)
            batch = batch.filter(pa.array(good))
            columns = {name: values.filter(pa.array(good)) for name, values in columns.items()}
            keys, split, files = keys[good], split[good], files[good]
        gather(self.seen, self._plan.at(split, columns, keys))
        return batch, files, count

    def _reject(self, given: Arrays, flags: Mapping[str, Flags]) -> None:
        """Keeps the reasons of the given rows that must not be published. Drawn rows follow them, and need none."""
        rows = pa.record_batch(dict(given))
        late: Reasons = {}
        for reason, bad in flags.items():
            for row in np.flatnonzero(bad[: rows.num_rows]).tolist():
                late.setdefault(row, reason)
        if PLACE[0] not in given:
            self.rejected.append(describe(NOWHERE, None, rows, late.items()))
            return
        places = rows.select(PLACE).take(pa.array(list(late), pa.int64())).to_pylist()
        for place, reason in zip(places, late.values(), strict=True):
            file, part, line = place.values()
            self.late[file, part][line] = reason
