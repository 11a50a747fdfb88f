"""The commands of docs/launch.md and docs/workers.yaml are what the programs take, word for word."""

import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from sluice.common.settings import parse
from sluice.dlrm.train import main
from sluice.ingest.remote.worker import WorkerOptions
from tests.dlrm import clicks_table
from tests.product import Machine

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "launch.md").read_text()
ROWS = 16_000


def torchrun_commands() -> list[list[str]]:
    """The words of each torchrun command of the page, those of the Kubernetes job among them."""
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", PAGE, re.M | re.S)
    commands = []
    for block in blocks:
        if block.startswith("apiVersion"):
            for document in yaml.safe_load_all(block):
                if document["kind"] == "Job":
                    commands.append(
                        document["spec"]["template"]["spec"]["containers"][0]["command"]
                    )
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace("$SLURM_NNODES", "4"))
            if "torchrun" in words and "sluice.dlrm.train" in words:
                commands.append(words[words.index("torchrun") :])
    return [list(map(str, words)) for words in commands]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    raw = clicks_table.raw_rows(ROWS)
    assert isinstance(raw, pa.Table)
    return clicks_table.write(tmp_path_factory.mktemp("launch") / "table", raw)


@pytest.fixture(autouse=True)
def memory_of_a_new_process(monkeypatch):
    """A plan counts the memory that a rank has in use. Here, earlier tests may have left more than a rank ever has."""
    monkeypatch.setattr(Machine, "memory_used", lambda _machine: 400 * 2**20)


@pytest.mark.parametrize("words", torchrun_commands(), ids=" ".join)
def test_a_torchrun_command_can_train(table, tmp_path, words):
    launch, own = words[1 : words.index("-m")], words[words.index("sluice.dlrm.train") + 1 :]
    options = dict(word.removeprefix("--").split("=", 1) for word in launch)
    hosts, ranks = int(options.get("nnodes", 1)), int(options["nproc-per-node"])
    if hosts > 1:
        assert int(options["max-restarts"]) >= 1, "a lost host ends the run otherwise"
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in PAGE
    here = {"--data": str(table.uri), "--run-dir": str(tmp_path / "run"), "--metrics-port": "0"}
    for name, value in here.items():
        if name in own:
            own[own.index(name) + 1] = value
    plan = main([*own, "--check", "--ranks", str(hosts * ranks), "--ranks-per-host", str(ranks)])
    assert plan is not None
    assert plan["ok"]


@pytest.mark.parametrize("ranks", [2**power for power in range(7)])
def test_every_power_of_two_up_to_64_can_train_with_default_settings(table, tmp_path, ranks):
    per_host = min(ranks, 8)
    words = f"--data {table.uri} --run-dir {tmp_path}/run --check".split()
    plan = main([*words, *f"--ranks {ranks} --ranks-per-host {per_host}".split()])
    assert plan is not None
    assert plan["ok"]
    assert plan["rows_read_per_step"] == plan["settings"]["batch_size"] // min(ranks, 8)


def test_the_pods_that_read_are_given_words_that_a_worker_takes():
    (pod,) = [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all((ROOT / "docs" / "workers.yaml").read_text())
        if document["kind"] == "StatefulSet"
    ]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["sluice", "worker"]
    options = parse(WorkerOptions, argv=container["command"][2:], prog="sluice worker")
    assert options.table.startswith("s3://")
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    files = (options.token_file, options.tls_certificate, options.tls_key)
    assert {str(Path(file).parent) for file in files} <= mounted
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}, (
        "threads and memory follow the pod's quota"
    )
    assert container["envFrom"], "an s3 table needs credentials"
