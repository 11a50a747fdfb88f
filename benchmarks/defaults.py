"""The trainer's default settings against a tuned logistic regression: `python -m benchmarks.defaults --work DIR`.

Fixed beforehand: the metric is the AUC on 60,000 test rows that neither saw; cases are synthetic Criteo clicks
(`sluice.etl.synth.criteo`, heavy-tailed categories) of 8, 20, 100 and 400 thousand rows, of which 80 % are trained on
and 10 % are validation, three seeds each, none of which the settings were chosen on. `sluice train` gets the table that
features/criteo.toml makes, and no setting. The regression gets the raw columns: each category's value, and each count's
bucket floor(ln(x + 3)²), hashed to 2^20 one-hot features, a missing value as one of its own, and the counts' logarithms
beside them; L2, the strength searched on the validation rows, L-BFGS to the end.

--labels main leaves the products of columns out of the click model, so that a regression without interactions is the
true model: the hardest case for any other. The aim: at most .005 below it from 8,000 rows on, above it from 100,000.
The last line is JSON; --settings hands words on to `sluice train`, to compare other settings.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp
from scipy.optimize import minimize

from benchmarks.results import Results, table
from sluice.common.program import run, say
from sluice.dlrm.evaluation.metrics import auc
from sluice.etl.synth.criteo import CATEGORIES, INTEGERS, Clicks, SyntheticRows

ROOT = Path(__file__).resolve().parent.parent
TEST, BITS = 60_000, 20
STRENGTHS = (300, 100, 50, 30, 20, 10, 5, 3, 1)
SPLITS = ("train", "validation", "test")


def clicks_of(seed: int, labels: str) -> Clicks:
    """The source of rows; `main` leaves out the products."""
    clicks = Clicks(seed)
    if labels == "main":
        for name, effect in clicks.effects.items():
            if "/" in name:
                effect[:] = 0
    return clicks


def sizes(rows: int) -> list[int]:
    """The rows of train, validation and test."""
    return [round(0.8 * rows), round(0.1 * rows), TEST]


def features(rows: SyntheticRows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The hashed one-hot features of each row, and the logarithms of its counts."""
    none = np.zeros(len(rows), bool)
    logs = {n: np.log(np.where(rows.nulls.get(n, none), 0, rows.counts[n]) + 3.0) for n in INTEGERS}
    values = [np.floor(logs[n] ** 2).astype(np.int64) for n in INTEGERS] + [
        rows.ranks[n] for n in CATEGORIES
    ]
    columns = [
        (np.where(rows.nulls.get(n, none), -1, v) + 1) * 64 + i
        for i, (n, v) in enumerate(zip((*INTEGERS, *CATEGORIES), values, strict=True))
    ]
    mixed = np.stack(columns, 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(64 - BITS)).astype(np.int64), np.stack(list(logs.values()), 1)


def regression(rows: SyntheticRows, cut: list[int]) -> tuple[float, float]:
    """The test AUC of the strength that is best on the validation rows, and that strength."""
    hashed, numbers = features(rows)
    train, validation, _ = cut
    numbers = (numbers - numbers[:train].mean(0)) / numbers[:train].std(0)
    used = np.unique(hashed[:train])  # the weights of the others stay 0
    places = np.minimum(np.searchsorted(used, hashed), len(used) - 1)
    seen = (used[places] == hashed).astype(np.float64)
    whole = sp.hstack(
        [
            sp.csr_matrix(
                (seen.ravel(), places.ravel(), np.arange(len(rows) + 1) * hashed.shape[1]),
                shape=(len(rows), len(used)),
            ),
            sp.csr_matrix(numbers),
            sp.csr_matrix(np.ones((len(rows), 1))),
        ]
    ).tocsr()
    label = rows.label.astype(np.float64)
    own, transposed, target = whole[:train], whole[:train].T.tocsr(), label[:train]
    weights, pulled = np.zeros(whole.shape[1]), np.append(np.ones(whole.shape[1] - 1), 0.0)

    def area(first: int, stop: int) -> float:
        found = auc(whole[first:stop] @ weights, label[first:stop], np.ones(stop - first))
        assert found is not None
        return found

    best = (-1.0, 0.0, 0.0)  # validation, test, strength
    for strength in STRENGTHS:

        def loss(w: Any, strength: float = strength) -> tuple[float, Any]:
            logits = own @ w
            expected = 1 / (1 + np.exp(-logits))
            return (
                float(
                    (np.logaddexp(0, logits) - target * logits).sum()
                    + strength / 2 * (pulled * w * w).sum()
                ),
                transposed @ (expected - target) + strength * pulled * w,
            )

        weights = minimize(
            loss, weights, jac=True, method="L-BFGS-B", options={"maxiter": 200, "ftol": 1e-9}
        ).x
        judged = area(train, train + validation)
        best = max(best, (judged, area(train + validation, len(rows)), strength))
        if judged < best[0] - 0.005:
            break  # less of a pull only learns more by heart
    return best[1], best[2]


def trained(
    rows: SyntheticRows, cut: list[int], work: Path, seed: int, words: list[str]
) -> dict[str, Any]:
    """What `sluice train` says of its run over the same rows."""
    spec = (
        (ROOT / "features/criteo.toml")
        .read_text()
        .replace('"tsv"', '"parquet"')
        .replace('"C1..C26:text"]', '"C1..C26:text", "part:text"]')
    )
    work.mkdir(parents=True, exist_ok=True)
    (work / "spec.toml").write_text(re.sub(r"(split = .*)", r'\1\nsplit_column = "part"', spec))
    none = np.zeros(len(rows), bool)
    columns = {"label": pa.array(rows.label, pa.int32())}
    columns |= {
        n: pa.array(rows.counts[n].astype(np.int32), mask=rows.nulls.get(n, none)) for n in INTEGERS
    }
    columns |= {
        n: pa.array(
            [f"{code:08x}" for code in rows.codes(n).tolist()], mask=rows.nulls.get(n, none)
        )
        for n in CATEGORIES
    }
    columns["part"] = pa.array(np.repeat(SPLITS, cut))
    pq.write_table(pa.table(columns), work / "raw.parquet")
    if not (work / "table").exists():
        _sluice(
            "etl",
            "--spec",
            work / "spec.toml",
            "--input",
            work / "raw.parquet",
            "--output",
            work / "table",
            "--engine",
            "local",
        )
    number = sum(1 for _ in work.glob("run-*"))
    return _sluice(
        "train",
        "--data",
        work / "table",
        "--run-dir",
        work / f"run-{number}",
        "--seed",
        seed,
        *words,
    )


def _sluice(*words: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", default="8000,20000,100000,400000")
    parser.add_argument("--seeds", default="10,11,12")
    parser.add_argument("--labels", choices=("planted", "main"), default="planted")
    parser.add_argument("--settings", default="", help="words for sluice train")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    found, results = [], Results(args.work / "results.jsonl")
    for rows in map(int, args.rows.split(",")):
        for seed in map(int, args.seeds.split(",")):
            case, cut = {"rows": rows, "seed": seed, "labels": args.labels}, sizes(rows)
            made, folder = (
                clicks_of(seed, args.labels).rows(0, sum(cut)),
                args.work / f"{args.labels}-{rows}-{seed}",
            )
            plain, strength = results.once(case, partial(regression, made, cut))
            model = results.once(
                {**case, "settings": args.settings},
                partial(trained, made, cut, folder, seed, args.settings.split()),
            )
            found.append(
                {
                    "rows": rows,
                    "seed": seed,
                    "regression": round(plain, 4),
                    "L2": strength,
                    "trainer": round(model["auc"], 4),
                    "above": round(model["auc"] - plain, 4),
                    "NE": round(model["ne"], 3),
                    "calibration": round(model["calibration"], 3),
                    "steps": model["steps"],
                }
            )
            say(json.dumps(found[-1]))
    say(table(found))
    return {
        "labels": args.labels,
        "cases": found,
        "above": {
            str(n): round(statistics.mean(one["above"] for one in found if one["rows"] == n), 4)
            for n in sorted({one["rows"] for one in found})
        },
    }


if __name__ == "__main__":
    run(main)
