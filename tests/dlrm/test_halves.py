"""Steps whose rows are computed in two halves, by two threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.small_table import small_table
from sluice.dlrm.model.halves import run_in_halves
from sluice.dlrm.model.towers import build, tower_of
from sluice.dlrm.options import MODELS, Config, ConfigError, ModelConfig
from sluice.dlrm.ranks import machine, world
from sluice.dlrm.run_plan import plan_run
from sluice.dlrm.session import train
from tests.dlrm.test_towers import inputs, randomise
from tests.raises import raises


@pytest.fixture
def second():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("kind", MODELS)
def test_halves_have_the_logits_and_gradients_of_one_thread(second, kind, rows):
    tower = randomise(build(ModelConfig(kind=kind, width=8), dense=3, columns=4))
    drawn = inputs((rows, 3, 4, 8))
    given = [
        drawn[name].requires_grad_(name not in ("dense", "lengths"))
        for name in tower_of(kind).inputs
    ]
    wanted = [*(t for t in given if t.requires_grad), *tower.parameters()]
    weight = torch.arange(rows) + 1.0

    def outcome(logits):
        return [logits, *torch.autograd.grad((logits * weight).sum(), wanted)]

    alone = outcome(tower(*given))
    halves = [outcome(run_in_halves(second, tower, given, tower.parameters())) for _ in range(2)]
    torch.testing.assert_close(halves[0], alone)
    assert all(map(torch.equal, *halves))
    with torch.no_grad():
        logits = run_in_halves(second, tower, given, tower.parameters())
    assert torch.equal(logits, halves[0][0])
    assert not logits.requires_grad


def squared(second, at):
    """The sum of the squares of five rows; `at` gets the first row of a half, in each direction."""

    def run(values):
        at(values[0])
        squares = values.square()
        squares.register_hook(lambda _: at(values[0]))
        return squares

    return run_in_halves(second, run, [torch.arange(5.0).requires_grad_()], []).sum()


def test_both_halves_are_computed_at_the_same_time_in_both_directions(second):
    both = threading.Barrier(2, timeout=60)

    def meet(_):
        both.wait()

    squared(second, meet).backward()


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_an_error_in_either_half_reaches_the_caller(second, row, backward):
    seen = []

    def fail(first):
        seen.append(int(first))
        if seen.count(row) == 1 + backward:
            raise OverflowError

    with pytest.raises(OverflowError):
        squared(second, fail).backward()
    assert seen.count(row) == 1 + backward


def test_the_second_thread_has_one_thread_of_torch_and_ends_with_an_interrupt():
    before, threads = threading.active_count(), torch.get_num_threads()
    torch.set_num_threads(2)

    def interrupted():
        with world(halves=True) as here:
            assert (
                here.second.submit(torch.get_num_threads).result() == torch.get_num_threads() == 1
            )
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    torch.set_num_threads(threads)
    assert threading.active_count() == before


@pytest.mark.parametrize("how", ["halves", "operations"])
def test_the_option_makes_the_second_thread(monkeypatch, how):
    def world(_rows, *, halves):
        raise InterruptedError(halves)

    monkeypatch.setattr(train, "world", world)
    run = SimpleNamespace(config=Config(data="", version=0, step_threads=how))
    with raises(InterruptedError, str(how == "halves")):
        train.train(run, *[None] * 3)


def test_halves_are_refused_by_name_where_a_rank_has_no_two_cores(tmp_path):
    table = small_table(tmp_path / "table", rows=640, values=50, files=1, row_group_rows=64)
    config = Config(data=table.uri, version=0, step_threads="halves")
    here = machine(1, 1)
    plan_run(config, table, replace(here, cores=2))
    for device, cores in (("cpu", 1), ("cuda", 8)):
        with raises(ConfigError, "--step-threads halves", device, f"{cores} cores"):
            plan_run(config, table, replace(here, device=device, cores=cores))
