"""`sluice.Loader`: tuned from its first batch, gone with its last, and at home in a stranger's loop."""

import copy
import functools
import gc
import itertools
import json
import math
import threading
from collections import deque
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from sluice import Errors, Knobs, Loader, Order, Transform
from sluice.agent.report.prometheus import LoaderMetrics
from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals import intune
from tests.ingest.twin import eventually, halve
from tests.product import (
    BatchLoader,
    Controller,
    KnobError,
    LoaderError,
    Machine,
    PetastormOptions,
    Run,
    RunError,
    Story,
    TransformError,
)
from tests.raises import assert_names, raises
from tests.run_program import run_program

pytestmark = pytest.mark.slow

ROLES = {"label": "clicked", "dense": "price", "sparse": ["item"]}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    random = np.random.default_rng(0)
    for part in range(2):
        rows = 1000
        pq.write_table(
            pa.table(
                {
                    "clicked": random.integers(0, 2, rows).astype(np.int8),
                    "price": random.random(rows).astype(np.float32),
                    "item": random.integers(0, 50, rows).astype(np.int32),
                }
            ),
            folder / f"part-{part}.parquet",
            row_group_size=200,
        )
    return str(folder)


class Four(Policy):
    """A policy that wants four readers."""

    name = "four"

    def initial(self, limits, knobs):
        return knobs

    def decide(self, snapshot, state):
        return (
            state.with_workers(decode=4),
            state,
            Reason(text="four are enough", bottleneck="decode"),
        )


def loader_of(clicks, **more):
    return Loader(clicks, **{"batch_size": 80, "roles": ROLES, **more})


def agents():
    return [t for t in threading.enumerate() if t.name == "sluice-agent"]


def test_an_agent_turns_the_knobs_from_the_first_batch_on_and_the_order_stays(clicks, tmp_path):
    with BatchLoader(clicks, batch_size=80, roles=ROLES) as plain:
        deque(plain, maxlen=0)
    with loader_of(clicks, tuning=Four(), run_dir=tmp_path / "run") as loader:
        assert not agents()
        deque(loader, maxlen=0)
        assert len(agents()) == 1
        assert loader.order_hash == plain.order_hash
        eventually(lambda: loader.knobs.workers["decode"] == 4)
        eventually(lambda: loader.tuning.decisions == 1)
        assert "decode=4" in str(loader.tuning)
        assert str(loader.tuning).endswith("four are enough")
    assert not agents()
    assert loader.tuning.decisions == 1
    run = Run.read(tmp_path / "run")
    [end], [epoch] = run.of("end"), run.of("epoch")
    assert (end["rows"], end["tuning"], end["knobs"]["workers"]["decode"]) == (2000, "four", 4)
    assert epoch["order_hash"] == loader.order_hash
    assert "four are enough" in Story.of(run).explanation
    assert run.config["sparse"] == ["item"]
    assert "four are enough" in (tmp_path / "run" / "report.html").read_text()


def test_intune_turns_the_knobs_within_a_run_and_the_order_stays(clicks, monkeypatch):
    """It never has more workers than cores, so it gets some, and a network that wants one more in each stage."""
    monkeypatch.setattr(Machine, "cores", lambda _: 32.0)
    layers = {name: 0 * weights for name, weights in intune.load().items()}
    layers["bias3"].reshape(intune.PLACES, -1)[:, intune.STEPS.index(1)] = 1
    with BatchLoader(clicks, batch_size=80, roles=ROLES) as plain:
        hashes = [(deque(plain, maxlen=0), plain.order_hash)[1] for _ in range(2)]
    events, clock = [], itertools.count()
    with BatchLoader(clicks, batch_size=80, roles=ROLES) as loader:
        controller = Controller(
            loader, intune.InTune(layers), record=events.append, clock=lambda: next(clock)
        )
        for expected in hashes:
            for _ in loader:
                controller.step()
            assert loader.order_hash == expected
        controller.stop()
    assert controller.decisions, "nothing changed that could harm"
    assert not [event for event in events if event["kind"] == "fault"]


def test_one_command_starts_a_run_and_continues_it_in_its_folder(clicks, tmp_path):
    def train(epochs, **more):
        """What a program does at each start: it continues from its saved state, if there is one."""
        with loader_of(clicks, tuning=Four(), run_dir=tmp_path / "run", **more) as loader:
            if state:
                loader.load_state_dict(state[-1])
            for _ in range(epochs):
                deque(loader, maxlen=0)
                state.append(loader.state_dict())

    state = []
    train(1)
    train(2)
    run = Run.read(tmp_path / "run")
    assert [epoch["epoch"] for epoch in run.of("epoch")] == [1, 2, 3]
    assert len(run.of("end")) == 2
    times = [event["at"] for event in run.events]
    assert times == sorted(times)
    for name, before, other in (("batch_size", 80, 40), ("seed", 0, 1)):
        fact = f"{name} is {before} there and {other} here"
        with raises(RunError, tmp_path / "run", "already holds a run", fact):
            train(1, **{name: other})
    train(1, ranks=2)
    assert Run.read(tmp_path / "run").config["ranks"] == 2


def test_without_a_run_folder_nothing_is_written(clicks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with loader_of(clicks) as loader:
        deque(loader, maxlen=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "auto"),
        ({"knobs": Knobs(workers={"decode": 3})}, "fixed"),
        ({"tuning": "shadow"}, "shadow"),
        ({"knobs": Knobs(workers={"decode": 3}), "tuning": "shadow"}, "shadow"),
    ],
)
def test_who_says_nothing_is_tuned_and_who_gives_knobs_keeps_them(clicks, given, mode):
    with loader_of(clicks, **given) as loader:
        assert loader.tuning.mode == mode
        if "knobs" in given:
            assert loader.knobs.workers["decode"] == 3


class TestEnds:
    def test_a_forgotten_loader_is_gone_with_its_agent(self, clicks, tmp_path):
        loader = loader_of(clicks, run_dir=tmp_path / "run")
        for _ in loader:
            break
        [agent] = agents()
        del loader, _
        gc.collect()
        agent.join(60)
        assert not agent.is_alive()
        eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("sluice")])
        assert len(Run.read(tmp_path / "run").of("end")) == 1
        assert (tmp_path / "run" / "report.html").exists()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
    def test_an_exception_in_the_loop_ends_it_and_is_noted(self, clicks, tmp_path, error):
        def loop():
            with loader_of(clicks, run_dir=tmp_path / "run") as loader:
                for _ in loader:
                    raise error("in the loop")

        with pytest.raises(error):
            loop()
        assert not agents()
        assert Run.read(tmp_path / "run").of("end")[0]["error"] == f"{error.__name__}: in the loop"

    def test_a_loader_that_cannot_write_its_folder_leaves_nothing(self, clicks, tmp_path):
        (tmp_path / "file").touch()
        with raises(RunError, "is a file"):
            loader_of(clicks, run_dir=tmp_path / "file")
        gc.collect()
        assert not agents()

    def test_a_fork_ends_although_a_thread_held_a_lock_and_harms_nobody(self, clicks, tmp_path):
        """The locks of a thread that is not in the fork are held there for ever; worker processes are the other's. The
        program forgets its loader, and leaves one record."""
        code = (
            "import os, sys, threading\nfrom sluice import Knobs, Loader\n"
            "from sluice.ingest.errors import LoaderError\n"
            "loader = Loader(sys.argv[1], batch_size=80, read_ahead_epochs=10**6,\n"
            "                roles='label=clicked;dense=price;sparse=item', run_dir=sys.argv[2],\n"
            "                transforms=['examples.demo.squash:squash'],\n"
            "                knobs=Knobs(backend={'squash': 'process'}))\n"
            "batches = iter(loader)\nnext(batches)\n"
            "held, over, workers = threading.Event(), threading.Event(), loader.pipeline.worker_pids\n"
            "def hold():\n    with loader.pipeline._lock:\n        held.set()\n        over.wait()\n"
            "thread = threading.Thread(target=hold)\nthread.start()\nheld.wait()\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    try:\n        next(batches)\n        next(iter(loader))\n"
            "    except LoaderError as error:\n        print(error, flush=True)\n"
            "    loader.close()\n    sys.exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0\nover.set()\nthread.join()\n"
            "assert workers and loader.pipeline.worker_pids == workers\n"
            "print(sum(1 for _ in batches))\nassert not loader.pipeline.restarts\n"
        )
        done = run_program("-W", "ignore", "-c", code, clicks, tmp_path / "run")
        assert (done.returncode, done.stderr) == (0, "")
        error, rest = done.stdout.splitlines()
        assert "forked" in error
        assert int(rest) == 24
        [end] = Run.read(tmp_path / "run").of("end")
        assert end["rows"] == 2000
        assert (tmp_path / "run" / "report.html").exists()


class TestWhatItSays:
    @pytest.mark.parametrize(
        ("wrong", "error", "facts"),
        [
            ({"batchsize": 80}, TypeError, ["'batchsize'", "'batch_size'"]),
            ({"window_rows": 10}, TypeError, ["'window_rows'", "order=Order(window_rows=…)"]),
            ({"zz": 1}, TypeError, ["'zz' (known: allow_code,"]),
            ({"tuning": "intune"}, KnobError, ["'intune'", "sluice bench --tuning intune"]),
            ({"epochs": 2}, TypeError, ["'epochs'", "earlier version: take read_ahead_epochs"]),
            ({"step_threads": 2}, TypeError, ["'step_threads'", "earlier version", "leave it out"]),
            ({"batch_size": "80"}, LoaderError, ["batch_size=8"]),
            ({"order": "shuffle"}, LoaderError, ["order=Order(shuffle=False)"]),
            ({"hash": {"itm": 5}}, ValueError, ["hash", "'itm'", "'item'"]),
            ({"memory_limit": "2 lots"}, ValueError, ["'2 lots'", "number of bytes"]),
            ({"transforms": [3]}, TransformError, ["is not a function"]),
            ({"transforms": halve}, TransformError, ["transforms=[…]", "halve"]),
            ({"transforms": [halve, halve]}, TransformError, ["'halve'", "its own name"]),
        ],
    )
    def test_a_wrong_argument_is_refused_before_anything_starts(self, clicks, wrong, error, facts):
        with raises(error, *facts):
            loader_of(clicks, **wrong)
        assert not [t for t in threading.enumerate() if t.name.startswith("sluice")]

    @pytest.mark.parametrize(
        ("kind", "wrong", "hint"),
        [
            (Order, "shufle", "did you mean 'shuffle'?"),
            (PetastormOptions, "step_threads", "earlier version: leave it out"),
            (Transform, "read", "did you mean 'reads'?"),
        ],
    )
    def test_an_unknown_field_is_answered_with_the_one_that_was_meant(self, kind, wrong, hint):
        with raises(TypeError, kind.__name__, repr(wrong), hint):
            kind(**{wrong: 1})

    def test_rows_that_fill_no_batch_are_reported_and_quarantined_rows_at_the_end(
        self, clicks, tmp_path, capsys
    ):
        """Of 2,000 rows 1,800 are in batches of 300; six of them have a price that is none."""

        def spoil(columns):
            columns["price"][:1] = np.nan

        aside = Errors(on_error="quarantine", quarantine=tmp_path / "aside.jsonl")
        with loader_of(
            clicks, batch_size=300, order=Order(streams=1), errors=aside, transforms=[spoil]
        ) as loader:
            assert_names(capsys.readouterr().err, "200 of 2,000 rows", "batch of 300")
            deque(loader, maxlen=0)
            assert not capsys.readouterr().err
        told = f"6 rows were quarantined (batch: ColumnError: 6); {tmp_path / 'aside.jsonl'} lists them\n"
        assert capsys.readouterr().err == told
        loader.close()
        with loader_of(clicks, batch_size=300, order=Order(streams=1, last="pad")) as loader:
            deque(loader, maxlen=0)
        assert not capsys.readouterr().err

    def test_how_many_rows_an_embedding_needs_is_known_of_ids_as_they_are(self, tmp_path, capsys):
        """The footers of all files say it, of all row groups; where one does not, nobody knows."""
        for part in range(20):
            ids = pa.array([part % 7] * 4, pa.int16())
            pq.write_table(
                pa.table(
                    {
                        "y": [0, 1, 0, 1],
                        "item": [3, 4, 5, 300 if part == 11 else 6],
                        "quiet": ids,
                        "tags": [[1, 2], [40 if part == 13 else 7], [], None],
                    }
                ),
                tmp_path / f"{part:02}.parquet",
                row_group_size=2,
                write_statistics=True if part != 5 else ["y", "item"],
            )
        with Loader(str(tmp_path), batch_size=8, roles="label=y;sparse=tags,item,quiet") as loader:
            assert loader.sparse_names == ("tags", "item", "quiet")
            assert list(loader.cardinalities.items()) == [("item", 301)]


class TestRanks:
    def test_ranks_of_a_host_share_its_cores_and_memory(self, clicks, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with loader_of(clicks, rank=1, ranks=4) as loader:
            seen = loader.snapshot()
            assert math.isclose(seen.cpu_quota, Machine().cores() / 2)
            assert seen.memory_limit <= Machine().memory_limit() // 2
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        for ranks in (1, 4):
            with loader_of(clicks, ranks=ranks) as loader:
                assert math.isclose(loader.snapshot().cpu_quota, Machine().cores() / ranks)

    def test_only_the_first_rank_writes(self, clicks, tmp_path):
        with loader_of(clicks, rank=1, ranks=2, run_dir=tmp_path / "run") as loader:
            deque(loader, maxlen=0)
        assert not (tmp_path / "run").exists()


def halve_price(columns):
    return {"price": columns["price"] / 2}


class TestTransforms:
    def test_functions_are_named_after_themselves(self, clicks):
        def closure(columns):
            return {"price": columns["price"] + 1}

        with (
            loader_of(clicks) as plain,
            loader_of(
                clicks,
                transforms=[
                    halve_price,
                    closure,
                    lambda columns: None,
                    functools.partial(shifted, by=3),
                ],
            ) as loader,
        ):
            for before, after in zip(plain, loader, strict=True):
                assert torch.allclose(before.dense[:, 0] / 2 + 4, after.dense[:, 0])
            assert loader.state_dict()["transforms"] == {
                "halve_price": "tests.test_loader:halve_price",
                "closure": None,
                "lambda": None,
                "shifted": None,
            }
            backends = loader.limits.backends
            assert list(backends) == ["halve_price"], "what no process can import runs in threads"

    def test_a_notebooks_function_stays_in_this_process(self):
        cell = {"__name__": "__main__"}
        exec("def f(columns):\n    return None", cell)
        from sluice.ingest.stages.transform import Transform

        assert not Transform.of(cell["f"]).movable
        assert Transform.of(cell["f"]).code is None
        assert Transform.of(halve).function == "tests.ingest.twin:halve"
        assert Transform.of(("mine", halve)).movable

    def test_a_state_asks_for_the_transforms_that_it_was_made_with(self, clicks, tmp_path):
        with loader_of(
            clicks, transforms=[halve_price, lambda columns: None], run_dir=tmp_path / "run"
        ) as loader:
            next(iter(loader))
            state = json.loads(json.dumps(loader.state_dict()))
        assert Run.read(tmp_path / "run").config["transforms"] == {
            "halve_price": "tests.test_loader:halve_price",
            "lambda": "code without a name",
        }
        with (
            loader_of(clicks) as loader,
            raises(LoaderError, "'halve_price'", "tests.test_loader:halve_price"),
        ):
            loader.load_state_dict(state)
        with (
            loader_of(clicks, transforms=[halve_price]) as loader,
            raises(LoaderError, "'lambda'", "without an importable name"),
        ):
            loader.load_state_dict(state)
        with loader_of(clicks, transforms=[halve_price, lambda columns: None]) as loader:
            loader.load_state_dict(state)
            assert next(iter(loader)).step == 1


def shifted(columns, by):
    return {"price": columns["price"] + by}


class TestElsewhere:
    def test_torchs_dataloader_gives_the_same_and_moves_what_is_moved(self, clicks):
        with loader_of(clicks) as loader, loader_of(clicks) as plain:
            through = torch.utils.data.DataLoader(loader, batch_size=None)
            assert len(through) == len(loader)
            for ours, theirs in zip(plain, through, strict=True):
                assert torch.equal(ours.values, theirs.values)
            assert loader.tuning.mode == "auto"
            assert loader.order_hash == plain.order_hash

    @pytest.mark.parametrize("as_", ["batch", "dict"])
    def test_a_dataloader_that_would_collate_batches_is_told_what_to_write(self, clicks, as_):
        with (
            loader_of(clicks, as_=as_) as loader,
            raises(LoaderError, "DataLoader(loader, batch_size=None)"),
        ):
            iter(torch.utils.data.DataLoader(loader))

    def test_workers_of_a_dataloader_are_refused_with_what_to_write(self, clicks):
        with loader_of(clicks) as loader:
            through = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1)
            batches = iter(through)
            with raises(LoaderError, "batch_size=None, num_workers=0"):
                next(batches)
            batches._shutdown_workers()  # otherwise the worker waits for this process

    def test_pickling_and_copying_say_what_to_do(self, clicks):
        with loader_of(clicks) as loader:
            for attempt in (ForkingPickler.dumps, copy.copy, copy.deepcopy):
                with raises(LoaderError, "state_dict()", "num_workers=0"):
                    attempt(loader)


class TestStats:
    def test_rows_waits_and_stages_are_counted_from_the_first_batch_on(self, clicks):
        with loader_of(clicks, tuning="fixed", rank=1, ranks=2) as loader:
            assert loader.stats().to_dict() == {
                "rank": 1,
                "rows": 0,
                "rows_per_s": 0.0,
                "stall_fraction": 0.0,
            }
            batches = iter(loader)
            next(batches)
            first = loader.stats()
            taken = sum(batch.rows for batch in batches)
            stats = loader.stats()
        assert (first.rows, stats.rows, taken) == (0, 24 * 40, 24 * 40)
        assert sum(stats.durations["ready"]) == 24
        assert sum(stats.durations["decode"]) == 5, "row groups of this rank"
        assert stats.rows_per_s == pytest.approx(stats.rows / (stats.wait_s + stats.compute_s))
        figures = stats.to_dict()
        for name in ("ready", "decode"):
            assert 0 < figures[f"{name}_p50_s"] <= figures[f"{name}_p99_s"], name
        rest = stats.since(first)
        assert (rest.rows, sum(rest.durations["ready"])) == (24 * 40, 24)
        assert stats.since(stats).to_dict() == {
            "rank": 1,
            "rows": 0,
            "rows_per_s": 0.0,
            "stall_fraction": 0.0,
        }

    def test_prometheus_gets_them_of_a_bare_loader(self, clicks):
        with loader_of(clicks) as loader:
            registry = CollectorRegistry()
            registry.register(LoaderMetrics(loader))
            assert len(list(loader)) == 25
            text = generate_latest(registry).decode()
        assert "\nsluice_loader_rank 0.0\n" in text
        assert "\nsluice_loader_rows_total 2000.0\n" in text
        assert "\nsluice_loader_ready_seconds_count 24.0\n" in text
        assert '\nsluice_loader_stage_seconds_bucket{le="+Inf",stage="decode"} 10.0\n' in text
