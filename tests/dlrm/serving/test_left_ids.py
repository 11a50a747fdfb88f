"""A model is served the ids that it was trained on, whether Spark made them or the loader."""

from types import SimpleNamespace

import torch

from sluice import FeatureTable
from sluice.dlrm.options import profile_of
from tests.ingest import left_ids
from tests.product import (
    ColumnTransforms,
    Features,
    ModelConfig,
    Servable,
    Serving,
    online_of,
    tables_of,
)


def served(table: FeatureTable) -> Servable:
    """What `batch` needs of it."""
    state, tables = table.state(), tables_of(table.fields, ModelConfig(), profile_of(table))
    return Servable(
        path=None,
        meta=SimpleNamespace(dense=tuple(f.name for f in table.fields if f.role == "dense")),
        table=table,
        model=None,
        rows=Serving.open(table),
        features=Features(table.spec(), state),
        online=online_of(table, state),
        transforms=ColumnTransforms.of(table),
        layout=SimpleNamespace(missing=None, columns=tables),
    )


def test_ids_left_to_the_loader_are_made_in_serving_too(tmp_path):
    spark, left = left_ids.tables(tmp_path, 600)
    raw = left_ids.raw_rows(600).drop_columns("label")
    columns = {name: raw[name].combine_chunks() for name in raw.column_names}
    want, got = (served(table).batch(columns, {}) for table in (spark, left))
    assert torch.equal(got.values, want.values)
    assert torch.equal(got.lengths, want.lengths)
    assert torch.equal(got.dense, want.dense)
