"""Measures the accuracy cost of narrow tables: compares them with float32 tables on the same rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from sluice.dlrm.checkpoint.checkpoint import Checkpoint
from sluice.dlrm.evaluation.metrics import Quality, quality
from sluice.dlrm.options import Config
from sluice.dlrm.serving.served_model import Servable, ranker
from sluice.dlrm.training import loaders

_BATCH = 8192


def compared(servable: Servable, split: str, rows: int) -> tuple[Quality, Quality]:
    """Returns the quality with float32 tables, and with the servable's own tables, on the same rows of a split, at most
    `rows`."""
    trained = Config.from_dict(servable.meta.config)
    config = replace(trained, ranks=1, batch_size=_BATCH)
    wide, _ = ranker(
        trained, servable.layout, len(servable.meta.dense), Checkpoint(servable.path), "fp32"
    )
    measured: list[torch.Tensor] = []
    with (
        loaders.evaluation(config, servable.table, split, rank=0, local_ranks=1) as batches,
        torch.inference_mode(),
    ):
        for batch in batches:
            logits = [model(*servable.layout.features(batch)) for model in (wide, servable.model)]
            measured.append(torch.stack([*logits, batch.label, batch.weight]).double())
            if len(measured) * _BATCH >= rows:
                break
    wide_logits, narrow_logits, label, weight = torch.cat(measured, 1).numpy()
    return quality(wide_logits, label, weight), quality(narrow_logits, label, weight)
