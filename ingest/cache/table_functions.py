"""A table's transforms as functions over rows, whose results a cache can keep: `over_rows`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from sluice.ingest.stages.transform import Transform

if TYPE_CHECKING:
    from sluice.etl.schema import Field
    from sluice.etl.table.table import FeatureTable

_TYPES = {"dense": pa.float32(), "sparse": pa.int32()}
"""The types of single values of a feature table, by role. They are the same in its files and in batches."""


def over_rows(transforms: Sequence[Transform], table: FeatureTable) -> tuple[Transform, ...]:
    """Returns the first transforms of a feature table as functions over rows, up to one that must get batches: it is
    not pure, or it reads or gives something other than single values as the files store them."""
    types = {
        f.name: _TYPES[f.role]
        for f in table.stored
        if f.role in _TYPES and not f.online and f.type == str(_TYPES[f.role])
    }
    others = {f.name for f in table.stored} - types.keys()
    after = {f.name: f.role for f in table.fields}
    moved: list[Transform] = []
    for transform in transforms:
        if not (transform.pure and transform.movable and types.keys() >= set(transform.reads)):
            break
        gives = {name: _TYPES.get(after[name]) for name in transform.outputs}
        if None in gives.values() or not others.isdisjoint(gives):
            break
        types |= gives
        moved.append(replace(transform, gives=gives, outputs={}, added=()))
    return tuple(moved)


def fields_given(fields: Iterable[Field], given: Mapping[str, pa.DataType]) -> tuple[Field, ...]:
    """Returns a table's columns if functions over rows give some of them, so that these come as if they were stored."""
    return tuple(
        replace(f, made=False, stored_ids=None, type=str(given[f.name])) if f.name in given else f
        for f in fields
    )
