"""A model is served the ids that it was trained on, whether Spark made them or the loader."""

from sluice.dlrm.options import profile_of
from tests.dlrm.clicks_table import columns_of
from tests.dlrm.serving.stub import assert_same_features, servable
from tests.ingest import left_ids
from tests.product import ModelConfig, tables_of


def test_ids_left_to_the_loader_are_made_in_serving_too(tmp_path):
    spark, left = left_ids.tables(tmp_path, 600)
    columns = columns_of(left_ids.raw_rows(600).drop_columns("label"))
    want, got = (
        servable(table, *tables_of(table.fields, ModelConfig(), profile_of(table))).batch(
            columns, {}
        )
        for table in (spark, left)
    )
    assert_same_features(got, want)
