"""Two synthetic logs with the traits of public data sets, and the AUC of a logistic regression on the same rows.

Criteo: no header, the label first, counts up to 1e7, categories in hex. TalkingData: ids alone, and a time that only
positive rows have.
"""

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

_Floats = npt.NDArray[np.float64]
_FIRST = datetime.datetime(2017, 11, 6, tzinfo=datetime.UTC)


def _ids(rng: np.random.Generator, rows: int, values: int) -> npt.NDArray[np.int64]:
    """Ids of which few are frequent, in an order that has nothing to do with how frequent they are."""
    frequent = np.minimum((values * rng.random(rows) ** 3).astype(np.int64), values - 1)
    return rng.permutation(values)[frequent]


def _clicks(rng: np.random.Generator, scores: _Floats, rate: float) -> npt.NDArray[np.int64]:
    return (
        rng.random(len(scores)) < 1 / (1 + np.exp(-(scores - np.quantile(scores, 1 - rate))))
    ).astype(np.int64)


def _effects(rng: np.random.Generator, ids: npt.NDArray[np.int64], scale: float) -> _Floats:
    effects: _Floats = rng.normal(size=int(ids.max()) + 1)[ids] * scale
    return effects


def criteo(path: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns, scores = [], np.zeros(rows)
    for n in range(6):
        counts = np.minimum(np.exp(rng.normal(1 + n, 1 + n / 3, rows)).astype(np.int64), 10**7)
        counts[0] = 10**7 if n == 5 else counts[0]
        scores += 0.3 * (np.log1p(counts) - 1 - n)
        columns.append(np.where(rng.random(rows) < 0.1 * (n % 3), "", counts.astype(str)))
    for n in range(8):
        ids = _ids(rng, rows, (10, 30, 100, 300, 500, 1000, 3000, 20_000)[n])
        scores += _effects(rng, ids, 0.4)
        columns.append(np.array([f"{(id * 2654435761 + n) % 2**32:08x}" for id in ids]))
    label = _clicks(rng, scores, 0.3)
    path.write_text(
        "".join("\t".join(map(str, row)) + "\n" for row in zip(label, *columns, strict=True))
    )


def talking_data(path: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    at = np.sort(rng.integers(0, 4 * 86_400, rows))
    ip, app, os, channel = (
        _ids(rng, rows, 2000),
        _ids(rng, rows, 300),
        _ids(rng, rows, 100),
        _ids(rng, rows, 150) + 100,
    )
    device = np.where(rng.random(rows) < 0.9, 1, _ids(rng, rows, 3000))
    scores = (
        _effects(rng, app, 1.0)
        + _effects(rng, channel, 0.7)
        + _effects(rng, os, 0.4)
        + _effects(rng, ip, 0.3)
    )
    label = _clicks(rng, scores, 0.05)

    def told(seconds: int) -> str:
        return f"{_FIRST + datetime.timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}"

    _csv(
        path,
        {
            "ip": ip,
            "app": app,
            "device": device,
            "os": os,
            "channel": channel,
            "click_time": [told(int(moment)) for moment in at],
            "attributed_time": [
                told(int(moment) + 600) if positive else ""
                for moment, positive in zip(at, label, strict=True)
            ],
            "is_attributed": label,
        },
    )


def _csv(path: Path, columns: Mapping[str, Any]) -> None:
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")


STAND_INS: Mapping[str, tuple[Callable[[Path, int, int], None], str]] = {
    "criteo": (criteo, "tsv"),
    "talking_data": (talking_data, "csv"),
}
"""What writes each stand-in, and the end of its file's name."""


def logistic_auc(table: Any, *, size: int = 2**15) -> float:
    """The AUC on the test split of a logistic regression over the table's numbers and hashed ids. Its penalty is the
    one that does best on the validation split."""
    import pyarrow.parquet as pq

    from sluice.dlrm.evaluation.metrics import auc

    def part(split: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = pa.concat_tables(
            [pq.read_table(file.path, partitioning=None) for file in table.files_of(split)]
        )
        dense = [rows[f.name].to_numpy() for f in table.fields if f.role == "dense"]
        sparse = [
            (rows[f.name].to_numpy().astype(np.int64) * 1_000_003 + 7919 * n) % size
            for n, f in enumerate(table.fields)
            if f.role == "sparse"
        ]
        label = next(rows[f.name].to_numpy() for f in table.fields if f.role == "label")
        numbers = np.stack([np.ones(len(label)), *dense], 1)
        return (
            torch.tensor(numbers, dtype=torch.float32),
            torch.tensor(np.stack(sparse, 1)),
            torch.tensor(label, dtype=torch.float32),
        )

    splits = {split: part(split) for split in ("train", "validation", "test")}
    tried = []
    for penalty in (1e-5, 1e-4, 1e-3):
        tried.append(
            tuple(
                auc(
                    scores.double().numpy(), splits[split][2].double().numpy(), np.ones(len(scores))
                )
                for split, scores in _fitted(splits, size, penalty).items()
            )
        )
    return float(max(tried)[1])


def _fitted(
    splits: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]], size: int, penalty: float
) -> dict[str, torch.Tensor]:
    """The logits on the validation split and on the test split of a regression fitted to the training split."""
    weights = [
        torch.zeros(size, requires_grad=True),
        torch.zeros(splits["train"][0].shape[1], requires_grad=True),
    ]

    def logits(numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return weights[0][ids].sum(1) + numbers @ weights[1]

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        *inputs, label = splits["train"]
        wrong = torch.nn.functional.binary_cross_entropy_with_logits(logits(*inputs), label)
        wrong = wrong + penalty * (weights[0] ** 2).sum()
        wrong.backward()
        return wrong

    optimiser = torch.optim.LBFGS(weights, max_iter=60, line_search_fn="strong_wolfe")
    optimiser.step(loss)
    with torch.no_grad():
        return {split: logits(*splits[split][:2]) for split in ("validation", "test")}
