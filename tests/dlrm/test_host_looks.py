"""How often a step makes the host wait for the device, and how often ranks meet: the exact list, by option.

TorchRec on two ranks reads the sizes of what it exchanges, twice. On a GPU it does so for the next batch, while the
present one is computed. Numbers of the host that libraries read (an optimiser's step, for example) cost no wait."""

from __future__ import annotations

import pytest

from sluice.dlrm.ranks import world
from tests.dlrm.host_looks import CASES, all_looks
from tests.dlrm.rig import last_json

OURS = ("input_checks", "finite_guard", "synced_batches", "clip.", "ranks.", "trainer._report")
ON_THE_HOST = {
    "host item in input_checks._check_numbers": 2,
    "host item in input_checks.check": 1,
    "host nonzero in input_checks._check_ids": 1,
    "host tolist in input_checks._check_ids": 1,
    "host tolist in finite_guard.has_failed": 1,
}
"""The batch, before it is sent, and the loss, after it has arrived."""
TWO_RANKS = {
    "device allgather_base in comm_ops.backward": 1,
    "device alltoall_base in dist_data.__init__": 2,
    "device reduce_scatter_base in comm_ops.forward": 1,
    "device tolist in jagged_tensor._safe_tolist": 1,
    "host alltoall_base in dist_data.__init__": 1,
    "host allreduce in ranks.sum": 1,
    "host tolist in synced_batches._agree": 1,
}
"""TorchRec's exchange of ids and vectors, and the vote before each batch."""
MORE = {
    "plain": {},
    "clip": {},
    # The ranks must know before the backward pass, which updates tables.
    "skip": {"device item in finite_guard.admits": 1},
    # Once in --log-every steps.
    "report": {
        "device item in trainer._report": 1,
        "host allgather in ranks.gather": 1,
        "host tolist in trainer._report": 3,
    },
}
SECOND_VOTE = {
    "skip": {"host allreduce in ranks.sum": 2, "host item in finite_guard.admits": 1},
}


def expected(name: str, ranks: int) -> dict[str, int]:
    case, _, ahead = name.partition(", ")
    place = "train_pipelines._backward" if ahead else "trainer._step"
    found = {f"device allreduce in {place}": 1, **ON_THE_HOST, **MORE[case]}
    if ahead:
        found["host alltoall_base in dist_data.__init__"] = 1
    if ranks == 2:
        found |= TWO_RANKS
        found |= SECOND_VOTE.get(case, {})
    return found


def told(looks: dict[str, int]) -> dict[str, int]:
    """Without numbers of the host that libraries read."""
    return {
        look: count
        for look, count in looks.items()
        if not look.startswith(("host item", "host tolist", "host cpu"))
        or any(place in look for place in OURS)
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_rank_waits_for_the_device_only_where_an_option_needs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with world() as here:
        found = all_looks(here, tmp_path)
    assert len(found) == 2 * len(CASES)
    for name, looks in found.items():
        assert told(looks) == expected(name, 1), name


@pytest.mark.slow
def test_two_ranks_meet_once_before_each_batch(tmp_path, forks):
    process = forks.run("tests.dlrm.host_looks", tmp_path, tmp=tmp_path, ranks=2)
    assert process.returncode == 0, process.stderr[-3000:]
    for name, looks in last_json(process).items():
        assert told(looks) == expected(name, 2), name
