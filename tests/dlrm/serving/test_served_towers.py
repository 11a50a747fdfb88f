"""Every tower, and tables of every type, from a checkpoint into a server: the logits of the model that wrote it."""

from dataclasses import replace

import pytest
import torch

from sluice.dlrm.serving.served_model import ranker
from tests.dlrm.rig import DENSE, META, SIZES, SMALL, bagged, batch, torchrec_warns
from tests.product import (
    MODELS,
    Checkpoint,
    CheckpointError,
    Checkpoints,
    Config,
    ModelConfig,
    Table,
    TableLayout,
    latest,
    machine,
    parts_of,
    placed,
    world,
)
from tests.raises import raises

ITEMS = {"kind": "dien", "history": "small", "target": "tiny"}
HOW = [
    *({"kind": kind} for kind in MODELS if kind != "dien"),
    ITEMS,
    {**ITEMS, "history_table": "target"},
    {"table_dtype": "fp16"},
    {"table_dtype": "bf16", "spread": ("big",)},
]


@pytest.mark.slow
@torchrec_warns
def test_a_checkpoint_answers_in_a_server_as_in_training(tmp_path):
    with world() as here:
        for number, how in enumerate(HOW):
            model = ModelConfig(**SMALL, **how)
            columns = [
                Table(
                    name=name,
                    rows=SIZES["small"] if name == "tiny" else rows,
                    width=8,
                    longest=3 if name == "small" else 1,
                )
                for name, rows in SIZES.items()
            ]
            config, layout = (
                Config(data="fake", version=0, model=model),
                TableLayout(model, columns),
            )
            parts = parts_of(
                config, layout, len(DENSE), placed(config, layout.tables, machine(1, 1)), here
            )
            saved = Checkpoints(tmp_path / str(number), parts, here, keep=1)
            saved.save(META)
            saved.wait()
            saved.close()
            narrow = TableLayout(model, columns)
            alone = ranker(config, narrow, len(DENSE), Checkpoint(latest(saved.folder)[0]))
            drawn = bagged(batch(9, 64), 9)
            with torch.no_grad():
                logits = alone(*narrow.features(drawn))
                wanted = parts.model(*layout.features(drawn))
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-6, msg=str(how))
            share = 1 + (model.table_dtype != "fp32")
            assert alone.tables.bytes * share == sum(t.bytes for t in narrow.tables)
            assert logits.std() > 1e-3
            more = TableLayout(model, [replace(column, rows=column.rows + 1) for column in columns])
            with raises(CheckpointError, f"{columns[0].rows} rows", columns[0].rows + 1):
                ranker(config, more, len(DENSE), Checkpoint(latest(saved.folder)[0]))
