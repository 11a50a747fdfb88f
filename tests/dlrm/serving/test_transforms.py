"""A server makes of raw rows, transforms included, what the loader gave the trainer; and asks for the code again."""

import pytest

from sluice import FeatureTable
from sluice.dlrm.training import loaders
from sluice.etl.ops.base import OperatorError
from tests.dlrm import clicks_table
from tests.dlrm.serving.stub import assert_same_features
from tests.dlrm.transformed_table import MODULE, ROWS
from tests.product import Config, Servable
from tests.raises import raises

pytestmark = pytest.mark.slow


def test_a_server_asks_for_the_code_again(transformed):
    with raises(OperatorError, "'ratio'", f"--allow-code {MODULE}"):
        Servable.load(transformed / "run")


def test_a_server_makes_of_raw_rows_what_the_loader_gave_the_trainer(transformed):
    servable = Servable.load(transformed / "run", allow_code=(MODULE,))
    config = Config.from_dict(servable.meta.config)
    with loaders.evaluation(config, servable.table, "train", rank=0, local_ranks=1) as batches:
        batch = next(iter(batches))
    numbers = clicks_table.numbers_of(batch.dense[:, 0])
    raw = clicks_table.raw_rows(ROWS).drop_columns("label").take(numbers)
    plain = FeatureTable.open(config.data, allow_code=(MODULE,))
    assert [transform.name for transform in servable.table.transforms] == [
        *(transform.name for transform in plain.transforms),
        "doubled",
    ]
    made = servable.batch(clicks_table.columns_of(raw), {})
    assert_same_features(made, batch)
    columns = [c.name for c in servable.layout.columns]
    bags = batch.lengths.view(len(columns), -1)[columns.index("grams")]
    assert set(bags.tolist()) >= {0, 1}
