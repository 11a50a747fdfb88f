"""torchrun on several hosts, by docs/launch.md: with hosts lost or cut off, and then equal to one process."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.dlrm import epochs
from tests.dlrm.cluster import Cluster, ended
from tests.hosts import Hosts
from tests.product import Checkpoint, latest
from tests.raises import assert_names

pytestmark = pytest.mark.slow

CUT_S = 20.0
STALL_S = 5


@pytest.fixture
def table(tmp_path):
    return epochs.write(tmp_path)


@pytest.fixture
def hosts(tmp_path, request) -> Iterator[Hosts]:
    with Hosts(request.param, tmp_path) as made:
        yield made


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_killed_agent_and_then_the_host_in_its_place_are_replaced(hosts, table, tmp_path):
    """The agent is killed with its rank. The host in its place loses its power, so that no packet tells of it."""
    cluster = Cluster(hosts, tmp_path, "--stall-after", STALL_S)
    stays = cluster.agent(0, 2)
    cluster.agent(1, 2, "kill@17").end(-9)
    lost = cluster.agent(2, 2, "hold@27")
    lost.until((tmp_path / "log" / "held").exists)
    hosts.lose(2)
    stays.until(lambda: "rank 1 on host2 sent no heartbeat" in stays.said)
    ended([stays, cluster.agent(1, 2, name="new")])
    assert epochs.starts(table, tmp_path) == [0, 10, 20]


@pytest.mark.parametrize("hosts", [2], indirect=True)
def test_after_a_cut_of_the_network_the_same_agents_train_what_one_process_trains(
    hosts, table, tmp_path, forks
):
    """Both sides end their ranks within the limit, and each says whom it lost. In the end there are each loss, each
    weight and each state of one process, with the rows of the epoch once."""
    run = (*f"--data {tmp_path}/table --run-dir {tmp_path}/one".split(), *epochs.TRAIN)
    forks.train(*run, tmp=tmp_path)
    cluster = Cluster(hosts, tmp_path, "--stall-after", STALL_S)
    first, other = cluster.agent(0, 2), cluster.agent(1, 2, "hold@17")
    other.until((tmp_path / "log" / "held").exists)
    began = time.monotonic()
    hosts.cut(1)
    (tmp_path / "log" / "go").touch()
    first.until(lambda: "error: " in first.said)
    other.until(lambda: "error: " in other.said)
    assert time.monotonic() < began + CUT_S, "an end of the cut would have ended them"
    assert_names(first.said, "rank 1 on host1 sent no heartbeat", f"at most {STALL_S} s")
    assert_names(
        other.said, "rank 1 on host1 has lost the first rank's host", f"at most {STALL_S} s"
    )
    time.sleep(began + CUT_S - time.monotonic())  # the fault itself
    hosts.connect(1)
    ended([first, other])
    assert epochs.starts(table, tmp_path) == [0, 10]
    expected = epochs.losses(tmp_path / "one")
    assert set(expected) == set(range(1, epochs.STEPS + 1))
    assert epochs.losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)
    trained, wanted = (tensors(tmp_path / name) for name in ("run", "one"))
    assert set(trained) == set(wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(trained[key], value, atol=1e-5, rtol=0)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint."""
    reader = Checkpoint(latest(run / "checkpoints")[0])
    return reader.tensors(reader.sizes)
