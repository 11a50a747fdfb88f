"""The adapters in examples/: what is ours of them, and each on the real package where `make test-adapters` has made an
environment with it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.e2e.test_readme import blocks
from tests.etl.tables import write_rows

ROOT = Path(__file__).resolve().parent.parent.parent
ADAPTERS = {"fuxictr": "fuxictr_loader.py", "lightning": "lightning_data.py"}
"""Each has a page of its name in docs/how-to/, and a lock in benchmarks/peers/."""


def done_with(package: str, folder: Path, *words: object) -> str:
    """What Python prints in the environment that holds the package."""
    environment = ROOT / f".venv-peers-{package}"
    if not (environment / ".stamp").is_file():
        pytest.skip(
            f"{package} is not installed: make test-adapters makes {environment.name}, which holds it"
        )
    # Ray has sockets in the temporary folder, and the system takes no path of one beyond 107 letters.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:
        done = subprocess.run(
            [environment / "bin" / "python", *map(str, words)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "examples"),
                "TMPDIR": short,
                "OMP_NUM_THREADS": "1",
            },
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def said_by(package: str, folder: Path) -> dict:
    """The last line of an adapter's program, with few rows."""
    few = ("--rows", 20_000, "--batch-size", 512, "--rounds", 1, "--workers", 0)
    program = ROOT / "examples" / ADAPTERS[package]
    return json.loads(done_with(package, folder, program, *few).splitlines()[-1])


@pytest.mark.slow
def test_fuxictr_trains_from_our_batches_as_well_as_from_its_own(tmp_path):
    said = said_by("fuxictr", tmp_path)
    assert said["loading_beside_ray"]["beside"] == "Parquet by Ray"
    assert min(said[part]["ratio"] for part in ("loading", "training", "loading_beside_ray")) > 0
    ours, theirs = said["auc"]["sluice"], said["auc"][said["training"]["beside"]]
    assert ours > 0.65
    assert abs(ours - theirs) < 0.03


@pytest.mark.slow
def test_lightning_resumes_at_the_same_row_and_ends_with_the_same_weights(tmp_path):
    said = said_by("lightning", tmp_path)
    assert said["resumed_exactly"]
    assert min(said["loading"]["ratio"], said["training"]["ratio"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("package", ADAPTERS)
def test_the_page_of_an_adapter_works_on_the_tutorials_files(package, tmp_path):
    code = "\n".join(
        [
            blocks("python", "docs/tutorial.md")[0].replace("50_000", "5_000"),
            *blocks("py", f"docs/how-to/{package}.md"),
        ]
    )
    assert "auto" in done_with(package, tmp_path, "-c", code)


@pytest.fixture
def prepared(tmp_path):
    """A file and a feature map as FuxiCTR's preprocessing leaves them."""
    rows, random = 1000, np.random.default_rng(0)
    columns = {
        "price": random.normal(size=rows),
        "item": np.arange(rows),
        "query": random.integers(0, 9, rows),
        "clicked": random.integers(0, 2, rows).astype(np.float64),
    }
    history = random.integers(0, 50, (rows, 4))
    write_rows(tmp_path / "train.parquet", **columns, history=list(history))
    features = {
        "price": {"type": "numeric"},
        "item": {"type": "categorical", "vocab_size": rows},
        "history": {"type": "sequence", "vocab_size": 50, "max_len": 4},
        "query": {"type": "meta"},
    }
    columns["history"] = history
    return str(tmp_path / "train"), SimpleNamespace(features=features, labels=["clicked"]), columns


@pytest.fixture
def fuxictr_loader(monkeypatch):
    """The module, whose adapter needs nothing of FuxiCTR."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import fuxictr_loader

    yield fuxictr_loader
    del sys.modules["fuxictr_loader"]


def test_fuxictr_is_given_every_row_under_the_names_of_its_feature_map(prepared, fuxictr_loader):
    path, feature_map, columns = prepared
    as_they_lie = fuxictr_loader.SluiceDataLoader(feature_map, path, batch_size=96, num_workers=3)
    assert (as_they_lie.num_samples, as_they_lie.num_blocks, len(as_they_lie)) == (1000, 1, 11)
    try:
        batches = list(as_they_lie)
    finally:
        as_they_lie.loader.close()
    assert len(batches) == 11
    given = {
        name: np.concatenate([batch[name].numpy() for batch in batches]) for name in batches[0]
    }
    assert given.keys() == {"price", "item", "history", "query", "clicked"}
    assert all(np.allclose(given[name], columns[name]) for name in columns)
