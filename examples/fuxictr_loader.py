"""`SluiceDataLoader`: feeds FuxiCTR's models from Parquet, in place of FuxiCTR's own loaders.

    RankDataLoader(feature_map, stage="train", train_data="train", batch_size=8192, data_loader=SluiceDataLoader)

As a program, this file writes files like those of FuxiCTR's preprocessing, and trains a DCN of FuxiCTR's layers. It
measures the loading alone and the training, in turns with FuxiCTR's loaders. The last line is JSON.

    make test-adapters  # makes the environment, once
    OMP_NUM_THREADS=1 .venv-peers-fuxictr/bin/python examples/fuxictr_loader.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from measuring import CATEGORIES, NUMBERS, VALUES, make_clicks, measure_in_turns

from sluice import BagColumn, Loader, Order


class SluiceDataLoader:
    """Yields the columns of a feature map from Parquet files, as tensors. Each epoch has every row once.

    `data_path` is a file or a folder of files. Its `.parquet` may be left out. Without `shuffle`, rows keep the order
    of the files. `hash` and `fill` go to `sluice.Loader`, for files that FuxiCTR has not prepared."""

    def __init__(
        self,
        feature_map: Any,
        data_path: str,
        *,
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int = 1,
        hash: Mapping[str, int] | None = None,
        fill: Mapping[str, float] | float | None = None,
        **_: Any,
    ):
        self._features, self._labels = feature_map.features, feature_map.labels
        kinds = {name: spec["type"] for name, spec in self._features.items()}
        if vectors := [name for name, kind in kinds.items() if kind == "embedding"]:
            raise ValueError(
                f"{', '.join(vectors)}: Sluice does not load vectors; use FuxiCTR's own loader"
            )
        roles = {
            "label": self._labels[0],
            "dense": [name for name, kind in kinds.items() if kind == "numeric"] + self._labels[1:],
            "sparse": [name for name, kind in kinds.items() if kind != "numeric"],
        }
        files = next(
            (path for path in (data_path, f"{data_path}.parquet") if os.path.exists(path)),
            data_path,
        )
        self.loader = Loader(
            files,
            batch_size=batch_size,
            roles=roles,
            hash=hash,
            fill=fill,
            seed=seed,
            read_ahead_epochs=epochs,
            order=Order(shuffle=shuffle, last="pad", streams=None if shuffle else 1),
        )
        self.num_samples = sum(map(sum, self.loader.plan.groups))
        self.num_blocks = len(self.loader.plan.groups)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.loader:
            columns = batch.as_dict()
            matrices = {
                name: self._matrix(name, columns[name]) for name in (*self._features, *self._labels)
            }
            if batch.rows < len(batch):  # the last batch is filled up with other rows
                real = batch.weight > 0
                matrices = {
                    name: column if len(column) == batch.rows else column[real]
                    for name, column in matrices.items()
                }
            yield matrices

    def _matrix(self, name: str, column: torch.Tensor | BagColumn) -> torch.Tensor:
        """Returns a column. A sequence becomes a matrix, because FuxiCTR pads all sequences to one length."""
        return (
            column.values.view(-1, self._features[name]["max_len"])
            if isinstance(column, BagColumn)
            else column
        )


def make_table(folder: Path, rows: int) -> None:
    """Writes files like those of FuxiCTR's preprocessing: Parquet, npz and a feature map."""
    columns = {
        name: values.astype(np.int64 if name in CATEGORIES else np.float64)
        for name, values in make_clicks(rows).items()
    }
    for name, part in (("train", slice(rows // 5, None)), ("valid", slice(rows // 5))):
        table = pa.table({column: values[part] for column, values in columns.items()})
        np.savez(folder / f"{name}.npz", **{column: table[column].to_numpy() for column in columns})
        (folder / "blocks" / name).mkdir(parents=True)
        some = -(-table.num_rows // 8)
        for number in range(8):
            pq.write_table(
                table.slice(number * some, some),
                folder / "blocks" / name / f"part_{number}.parquet",
            )
    features = [{name: {"source": "", "type": "numeric"}} for name in NUMBERS]
    features += [
        {name: {"source": "", "type": "categorical", "vocab_size": VALUES}} for name in CATEGORIES
    ]
    (folder / "feature_map.json").write_text(
        json.dumps(
            {
                "dataset_id": "clicks",
                "labels": ["click"],
                "input_length": len(features),
                "features": features,
            }
        )
    )


def dcn(feature_map: Any, folder: str) -> Any:
    """Returns a deep and cross network of FuxiCTR's layers."""
    from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    class DCN(BaseModel):
        def __init__(self) -> None:
            super().__init__(
                feature_map, model_id="DCN", verbose=0, model_root=folder, metrics=["AUC"]
            )
            os.makedirs(self.model_dir, exist_ok=True)
            width = feature_map.sum_emb_out_dim()
            self.embedding, self.cross = FeatureEmbedding(feature_map, 8), CrossNetV2(width, 2)
            self.deep = MLP_Block(
                width, hidden_units=[64], output_dim=1, output_activation="Sigmoid"
            )
            self.compile("adam", "binary_crossentropy", lr=0.003)

        def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {
                "y_pred": self.deep(
                    self.cross(self.embedding(self.get_inputs(inputs), flatten_emb=True))
                )
            }

    torch.manual_seed(0)
    return DCN()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in (("--rows", 200_000), ("--batch-size", 8192), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument(
        "--workers", type=int, nargs="*", default=[0, 2], help="of FuxiCTR's npz loader"
    )
    given = parser.parse_args()
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch.dataloaders import RankDataLoader

    with tempfile.TemporaryDirectory() as folder:
        make_table(Path(folder), given.rows)
        feature_map = FeatureMap("clicks", folder)
        feature_map.load(f"{folder}/feature_map.json", {"embedding_dim": 8})

        def loaders(place: str, **how: Any) -> tuple[Any, Any]:
            return RankDataLoader(
                feature_map,
                stage="train",
                train_data=f"{place}/train",
                valid_data=f"{place}/valid",
                batch_size=given.batch_size,
                **how,
            )

        every = {"sluice": loaders(f"{folder}/blocks", data_loader=SluiceDataLoader)}
        every |= {
            f"npz, {n} workers": loaders(folder, num_workers=n, data_format="npz")
            for n in given.workers
        }

        def loading(*names: str) -> dict[str, Any]:
            return measure_in_turns(
                {
                    name: lambda train=every[name][0]: sum(len(batch["click"]) for batch in train)
                    for name in names
                },
                given.rounds,
            )

        alone = loading(*every)
        models = {name: dcn(feature_map, folder) for name in ("sluice", alone["beside"])}

        def train_model(name: str) -> int:
            models[name].fit(every[name][0], epochs=1, validation_data=every[name][1])
            return sum(part.num_samples for part in every[name])

        training = measure_in_turns(
            {name: lambda name=name: train_model(name) for name in models}, given.rounds
        )
        auc = {
            name: round(float(model.evaluate(every["sluice"][1])["AUC"]), 3)
            for name, model in models.items()
        }
        # FuxiCTR's loader for Parquet comes last, because Ray's processes keep running and disturb what follows.
        every["Parquet by Ray"] = loaders(f"{folder}/blocks", data_format="parquet")
        print(
            json.dumps(
                {
                    "rows": given.rows,
                    "loading": alone,
                    "training": training,
                    "auc": auc,
                    "loading_beside_ray": loading("sluice", "Parquet by Ray"),
                }
            )
        )


if __name__ == "__main__":
    main()
