"""Training runs on one rank: losses, the tensors of their checkpoints, and the JSON keys of what programs tell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from sluice import Loader, Order
from tests.frozen import clicks
from tests.frozen.commands import call
from tests.frozen.digest import digest, key_paths, read_lines
from tests.frozen.loading import bytes_of

STORED = Path(__file__).parent / "stored"
MODELS = ("dlrm", "dcn", "autoint")
_SMALL = (
    "--width",
    4,
    "--dense-layers",
    8,
    "--over-layers",
    8,
    "--batch-size",
    64,
    "--log-every",
    1,
    "--tuning",
    "fixed",
)


def record(folder: Path) -> dict[str, Any]:
    """Trains on a new table, goes on with the stored run, and returns what both have left."""
    table = clicks.make_table(folder / "made", count=700)
    fresh = {model: _trained(table, folder / model, "--model", model) for model in MODELS}
    return {
        "fresh": fresh,
        "stored": _stored(folder / "stored"),
        "bench": key_paths(
            [call("bench", table, "--batch-size", 64, "--epochs", 1, "--run-dir", folder / "bench")]
        ),
    }


def _trained(table: Path, run: Path, *words: object) -> dict[str, Any]:
    told = call("train", "--data", table, "--run-dir", run, "--epochs", 2, *words, *_SMALL)
    result = {"losses": _losses(run), "checkpoint": _checkpoint(run)}
    return result | {"told": key_paths([told])} if "dlrm" in words else result


def _stored(folder: Path) -> dict[str, Any]:
    """Reads the stored table and run as programs of today do, and trains on to the end of the second epoch."""
    shutil.copytree(STORED, folder)
    table, run = folder / "table", folder / "run"
    judged = call("evaluate", "--data", table, "--run-dir", run, "--split", "test")
    with Loader(
        str(table), batch_size=32, seed=3, tuning="fixed", order=Order(last="pad")
    ) as loader:
        batches = digest(*map(bytes_of, loader))
        order_hash = loader.order_hash
    shown = call("show", table)
    call("train", "--data", table, "--run-dir", run, "--resume", "--epochs", 2, "--stop-auc", 0.999)
    return {
        "evaluate": key_paths([judged]),
        "logloss before": judged["logloss"],
        "order": order_hash,
        "batches": batches,
        "show": digest(shown["fields"], shown["fingerprint"]),
        "losses": _losses(run),
        "checkpoint": _checkpoint(run),
        "explain": key_paths([call("explain", run)]),
    }


def _losses(run: Path) -> list[float]:
    return [
        round(line["loss"], 6)
        for line in read_lines(run / "metrics.jsonl")
        if line["kind"] == "train"
    ]


def _checkpoint(run: Path) -> dict[str, Any]:
    """Returns the newest checkpoint: its files, the keys of its JSON, and its tensors with their types and shapes."""
    path = run / "checkpoints" / (run / "checkpoints/LATEST").read_text().split()[0]
    tensors = {
        name: value
        for file in sorted(path.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    meta, layout = (json.loads((path / name).read_text()) for name in ("meta.json", "layout.json"))
    del meta["config"]  # the options of this version
    return {
        "name": path.name,
        "files": sorted(file.name for file in path.iterdir()),
        "tensors": [
            f"{name} {value.dtype} {list(value.shape)}" for name, value in sorted(tensors.items())
        ],
        "bytes": [f"{name} {digest(value.tobytes())}" for name, value in sorted(tensors.items())],
        "meta": key_paths([meta]),
        "layout": key_paths([{**layout, "tensors": list(layout["tensors"].values())}]),
    }
