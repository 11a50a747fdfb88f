"""Training on a table in a bucket that refuses requests, over the real S3 protocol on 127.0.0.1."""

from pathlib import Path

import pytest

from benchmarks.small_table import small_table
from sluice.dlrm import train
from tests.dlrm.hostile_table import ended
from tests.dlrm.rig import logged, run_words
from tests.ingest.s3 import LOST, S3Server, with_bucket
from tests.product import RunError, RunFolder, latest
from tests.raises import raises
from tests.run_program import last_json

pytestmark = pytest.mark.slow
WORDS = "--epochs 2 --batch-size 128 --log-every 1"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return small_table(
        tmp_path_factory.mktemp("bucket") / "table",
        rows=1600,
        values=50,
        files=2,
        row_group_rows=256,
    )


@pytest.fixture(scope="module")
def trained_here(local, forks, tmp_path_factory):
    """What training on the local table ends with."""
    tmp = tmp_path_factory.mktemp("here")
    done = forks.train(*run_words(tmp, WORDS, data=local.uri), tmp=tmp)
    return result(done, tmp / "run")


@pytest.fixture
def server(local, monkeypatch):
    """A bucket with the table `s3://data/table`, found through the environment as by a user."""
    server = S3Server()
    files = with_bucket(server, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.address}")
    for path in Path(local.uri).rglob("*"):
        if path.is_file():
            with files.open_output_stream(f"data/table/{path.relative_to(local.uri)}") as out:
                out.write(path.read_bytes())
    yield server
    server.close()


def result(done, run):
    """AUC, the order hash of each epoch, and the bytes of the last checkpoint's tensors."""
    epochs = logged(run, "epoch")
    newest = latest(run / "checkpoints")[0]
    tensors = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    assert epochs
    assert tensors
    return last_json(done)["auc"], [epoch["order_hash"] for epoch in epochs], tensors


@pytest.mark.parametrize("status", [None, LOST])
def test_a_table_in_s3_is_trained_on_as_a_local_one(trained_here, server, forks, tmp_path, status):
    if status is not None:
        server.refuse(0.2, status)
    done = forks.train(*run_words(tmp_path, WORDS, data="s3://data/table"), tmp=tmp_path)
    refused = server.refused
    server.refuse(0)
    assert result(done, tmp_path / "run") == trained_here
    store = last_json(done)["input"]["store"]
    if status is not None:
        assert refused > 3
        assert 0 < store["retries"] <= refused
        assert store["gave_up"] == 0


def test_a_store_that_refuses_for_good_ends_the_start_with_the_tables_uri(server, forks, tmp_path):
    server.refuse(1, 403)
    words = run_words(tmp_path, WORDS, data="s3://data/table")
    done = forks.train(*words, tmp=tmp_path, code=2)
    assert "s3://data/table" in last_json(done)["error"]


@pytest.mark.parametrize("run", ["s3://data/run", "gs://data/run"])
def test_a_run_folder_in_a_bucket_is_refused_by_name_and_nothing_is_written(
    local, tmp_path, monkeypatch, capsys, run
):
    monkeypatch.chdir(tmp_path)
    with raises(RunError, run, "checkpoints/LATEST"):
        RunFolder.create(run, {})
    assert ended(train.main, *f"--data {local.uri} --run-dir {run} --check".split()) == 2
    assert run in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
