"""How many threads torch gets on a CPU, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sluice.dlrm import ranks


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 3),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 3),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 4),
        ({"OMP_WAIT_POLICY": "passive", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "4"}, 1),
        ({"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_a_core_is_left_to_the_loader_if_threads_spin_while_they_wait(
    monkeypatch, variables, threads
):
    found = []
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "Machine", lambda: SimpleNamespace(cores=lambda: 4.0))
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with ranks.world():
        assert found == ([] if threads is None else [threads])


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [("", None, "passive"), ("", "active", "active"), ("import torch", None, "None")],
)
def test_the_trainers_threads_wait_without_spinning_unless_torch_is_loaded(before, given, expected):
    code = f"""{before}
import os
from sluice.dlrm import train
train.run = lambda *given, **how: print(os.environ.get("OMP_WAIT_POLICY"))
train.program()
"""
    own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    told = {} if given is None else {"OMP_WAIT_POLICY": given}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**own, **told},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == [expected]
