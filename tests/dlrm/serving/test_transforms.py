"""A server makes of raw rows, transforms included, what the loader gave the trainer; and asks for the code again."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from sluice.dlrm.checkpoint.meta import CheckpointError, latest
from sluice.dlrm.options import Config
from sluice.dlrm.serving import served_model
from sluice.dlrm.serving.served_model import Servable
from sluice.dlrm.training import loaders
from sluice.etl.ops.base import OperatorError
from sluice.etl.table.table import FeatureTable
from tests.dlrm import clicks_table
from tests.dlrm.transformed_table import MODULE, ROWS
from tests.raises import raises

pytestmark = pytest.mark.slow


def test_a_server_asks_for_the_code_again(transformed, monkeypatch):
    with raises(OperatorError, "'ratio'", f"--allow-code {MODULE}"):
        Servable.load(transformed / "run", "fp32")
    monkeypatch.setitem(sys.modules, MODULE, None)  # it can no longer be imported
    with raises(OperatorError, "'ratio'", f"'{MODULE}:ratio'", "imported"):
        Servable.load(transformed / "run", "fp32", allow_code=(MODULE,))


def test_a_server_refuses_a_run_whose_row_groups_were_changed_as_it_reads_none(
    transformed, monkeypatch
):
    path, meta = latest(transformed / "run" / "checkpoints")
    changed = replace(meta, config={**meta.config, "transform_spec": "mine:halved"})
    monkeypatch.setattr(served_model, "find_checkpoint", lambda *_args, **_more: (path, changed))
    with raises(CheckpointError, "--transform-spec mine:halved"):
        Servable.load(transformed / "run", "fp32", allow_code=(MODULE,))


def test_a_server_makes_of_raw_rows_what_the_loader_gave_the_trainer(transformed):
    servable = Servable.load(transformed / "run", "fp32", allow_code=(MODULE,))
    config = Config.from_dict(servable.meta.config)
    with loaders.evaluation(config, servable.table, "train", rank=0, local_ranks=1) as batches:
        batch = next(iter(batches))
    order = batch.dense[:, 0].argsort()[:200]  # each row has a number of its own
    numbers = torch.expm1(batch.dense[order, 0].double()).round().long().tolist()
    raw = clicks_table.raw_rows(ROWS).drop_columns("label").take(numbers)
    plain = FeatureTable.open(config.data, allow_code=(MODULE,))
    assert [one.name for one in servable.table.transforms] == [
        *(one.name for one in plain.transforms),
        "doubled",
    ]
    made = servable.batch({name: raw[name].combine_chunks() for name in raw.column_names})
    torch.testing.assert_close(made.dense, batch.dense[order], rtol=0, atol=0)
    columns = [c.name for c in servable.layout.columns]

    def rows_of(one, rows: int) -> list[list[list[int]]]:
        lengths = one.lengths.view(len(columns), rows)
        ids = one.values.split(lengths.sum(1).tolist())
        return [
            [bag.tolist() for bag in part.split(counts)]
            for part, counts in zip(ids, lengths.tolist(), strict=True)
        ]

    theirs = rows_of(batch, len(batch.label))
    assert rows_of(made, 200) == [[column[row] for row in order.tolist()] for column in theirs]
    assert {len(bag) for bag in theirs[columns.index("grams")]} >= {0, 1}
