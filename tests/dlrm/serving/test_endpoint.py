"""What a rank tells Prometheus, and that the dashboard asks for nothing else."""

import json
import os
import re
import socket
import urllib.request
from types import SimpleNamespace

from prometheus_client import generate_latest

from sluice.dlrm.serving.http import ServerMetrics
from sluice.dlrm.session.session import TrainingSession
from sluice.ingest.stats import LoaderStats
from tests import ports
from tests.product import (
    ConfigError,
    Durations,
    Endpoint,
    RunError,
    RunFolder,
    Snapshot,
    StageStats,
    served,
)
from tests.raises import raises

STAGE = StageStats(
    name="decode",
    items=2,
    rows=300,
    bytes=4000,
    busy_s=1.5,
    cpu_s=1.0,
    wait_input_s=0.5,
    wait_output_s=0.25,
    workers=3,
    queue_bytes=77,
)
NOW = Snapshot(
    at=1.0,
    sequence=0,
    stages=(STAGE,),
    batches=5,
    rows=250,
    consumer_wait_s=0.5,
    consumer_compute_s=2.0,
    memory_used=1000,
    memory_limit=4000,
    cpu_quota=2.0,
    cpu_used_s=3.0,
    held_back=1,
    elsewhere={"workers": 4, "bytes": 900, "retries": 2, "hedges": 1, "core_s": 7.5},
)
WAITS = Durations()
for seconds in (1e-5, 1e-5, 0.3):
    WAITS.add(seconds)
STATS = LoaderStats(
    rank=1,
    rows=250,
    wait_s=0.5,
    compute_s=2.0,
    durations={"ready": tuple(WAITS.counts), "decode": tuple(WAITS.counts)},
)
LOADER = SimpleNamespace(snapshot=lambda: NOW, stats=lambda: STATS)
FAULT = "fault cores=1@10s: 1 core instead of 2"


def filled(auc: float | None) -> Endpoint:
    endpoint = Endpoint(1, clock=lambda: 1_790_000_000.25)
    endpoint.show_loader(LOADER, version=4)
    endpoint.metric(
        {"kind": "train", "step": 20, "epoch": 1, "loss": 0.5, "samples_per_s": 99.0, "stall": 0.25}
    )
    endpoint.metric(
        {
            "kind": "eval",
            "split": "test",
            "auc": auc,
            "ne": 0.75,
            "logloss": 0.5,
            "calibration": 1.0,
        }
    )
    endpoint.event(
        {
            "kind": "decision",
            "before": {"workers": {"decode": 1}},
            "after": {"workers": {"decode": 4}},
        }
    )
    endpoint.event({"kind": "fault", "fault": "cores=1@10s", "did": "1 core instead of 2"})
    endpoint.metric({"kind": "slice"})
    return endpoint


def test_trainer_and_loader_are_exported():
    text = generate_latest(filled(None).registry).decode()
    for line in (
        "sluice_train_rank 1.0",
        "sluice_train_table_version 4.0",
        "sluice_train_step 20.0",
        "sluice_train_loss 0.5",
        "sluice_train_stall 0.25",
        'sluice_eval_ne{split="test"} 0.75',
        'sluice_train_last_event_timestamp_seconds{kind="decision",what="decode 1 → 4"} 1.79000000025e+09',
        f'sluice_train_last_event_timestamp_seconds{{kind="fault",what="{FAULT}"}} 1.79000000025e+09',
        "sluice_train_decisions_total 1.0",
        "sluice_loader_rows_total 250.0",
        "sluice_loader_consumer_wait_seconds_total 0.5",
        "sluice_loader_memory_limit 4000.0",
        'sluice_loader_stage_busy_seconds_total{stage="decode"} 1.5',
        'sluice_loader_stage_workers{stage="decode"} 3.0',
        "sluice_loader_rank 1.0",
        'sluice_loader_ready_seconds_bucket{le="1.52587890625e-05"} 2.0',
        'sluice_loader_ready_seconds_bucket{le="0.25"} 2.0',
        'sluice_loader_ready_seconds_bucket{le="0.5"} 3.0',
        "sluice_loader_ready_seconds_count 3.0",
        "sluice_loader_ready_seconds_sum 0.5",
        'sluice_loader_stage_seconds_bucket{le="0.5",stage="decode"} 3.0',
        "sluice_loader_elsewhere_workers 4.0",
        "sluice_loader_elsewhere_retries_total 2.0",
        "sluice_loader_elsewhere_core_seconds_total 7.5",
    ):
        assert f"\n{line}\n" in text
    assert 'sluice_eval_auc{split="test"}' not in text  # not defined, so not told


def test_every_metric_of_the_dashboard_is_exported(repo):
    """Of the trainer's endpoint, or of the server's."""
    served = ServerMetrics()
    served.requests(200).inc()
    served.missing("I1").inc()
    text = "".join(generate_latest(metrics.registry).decode() for metrics in (filled(0.75), served))
    told = {
        line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")
    }
    dashboard = json.loads((repo / "docs" / "grafana.json").read_text())
    panels, annotations = dashboard["panels"], dashboard["annotations"]["list"]
    targets = [*annotations, *(target for panel in panels for target in panel.get("targets", ()))]
    asked = {name for target in targets for name in re.findall(r"\bsluice_\w+", target["expr"])}
    assert [annotation["name"] for annotation in annotations] == ["Decisions", "What happened"]
    assert len(asked) > 30
    assert asked <= told, asked - told
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)


def test_it_is_served_and_ends():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        taken = probe.getsockname()[1]
        with (
            raises(ConfigError, f"127.0.0.1:{taken}", "rank 1"),
            served(Endpoint(3), str(taken - 1), 1),
        ):
            pass
    port, endpoint = ports.free(), Endpoint(0)
    with served(endpoint, f"127.0.0.1:{port}", 0):
        endpoint.show_loader(LOADER, version=2)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            assert b"sluice_train_table_version 2.0" in reply.read()
    with served(endpoint, "", 0):
        assert b"sluice_train_step" in generate_latest(endpoint.registry)
    for wrong in ("http", "127.0.0.1:", "70000", "0"):
        with raises(ConfigError, f"{wrong!r}", "[HOST:]PORT"), served(endpoint, wrong, 0):
            pass


def test_a_run_folder_in_use_is_named_before_a_port_in_use(tmp_path):
    """A second start of the same command has both in common with the first one."""
    run = SimpleNamespace(folder=tmp_path / "run", options=SimpleNamespace(pause=None))
    session = TrainingSession(
        run=run,
        ranks=SimpleNamespace(first=True, rank=0, local_rank=0),
        watchdog=None,
        activity=None,
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run.config = SimpleNamespace(metrics_port=f"127.0.0.1:{taken.getsockname()[1]}")
        folder = RunFolder.create(run.folder, {})
        with raises(RunError, run.folder, "in use by process", os.getpid()), session:
            pass
        folder.close()
        with raises(ConfigError, "cannot be listened on"), session:
            pass
