"""Transforms in threads and in processes, as a loader runs them."""

import itertools
import os
import signal
import threading
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from sluice import Errors, Knobs, Transform
from sluice.ingest.process import worker
from sluice.ingest.stages.transform_worker import TransformStage
from tests.etl.tables import write_rows
from tests.ingest import twin
from tests.open_loader import open_loader, quarantined_rows
from tests.product import Governor, KnobError, QuarantineError, TransformError, WorkerCrashed
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

NAME = "tests.ingest.worker_functions:"


def placed_in(backend):
    """Knobs under which the transform runs there."""
    return Knobs(backend={"mine": backend})


PROCESS = placed_in("process")
both = pytest.mark.parametrize("backend", ["thread", "process"])


def loading(table, function, knobs=PROCESS, **options):
    options = {"batch_size": 80, "window_rows": 60} | options  # so that an epoch is many items
    transform = function if isinstance(function, Transform) else Transform(function, "mine")
    return open_loader(table, transforms=[transform], knobs=knobs, **options)


def quarantined(folder, **more):
    return Errors(on_error="quarantine", max_rate=1, quarantine=folder / "aside", **more)


def contents(batch):
    return [
        zlib.crc32(t.contiguous().numpy())
        for t in (batch.dense, batch.values, batch.label, batch.weight)
    ]


EPOCHS = 8  # more than the least that a pipeline may read ahead


def all_of(loader, between=lambda step: None):
    """Checksums of all batches of some epochs, and the order hashes."""
    batches, hashes = [], []
    for _ in range(EPOCHS):
        for batch in loader:
            batches.append(contents(batch))
            between(len(batches))
        hashes.append(loader.order_hash)
    return batches, hashes


def test_a_stage_goes_on_in_its_threads_while_its_processes_start(table, monkeypatch):
    """No process can start before `may_start`, and many batches come before that."""
    with loading(table, NAME + "shifted", Knobs()) as loader:
        expected = all_of(loader)
    may_start = threading.Event()
    start = worker.Child

    def start_later(*given):
        assert may_start.wait(60), "no batch came while a process was starting"
        return start(*given)

    monkeypatch.setattr(worker, "Child", start_later)
    small = {"prefetch_bytes": 2**20, "read_ahead_bytes": 2**20}
    starting = []
    with loading(
        table, NAME + "shifted", Knobs(workers={"mine": 2}, **small), epochs=EPOCHS
    ) as loader:

        def turn(step):
            if step == 2:
                loader.apply(placed_in("process"))
            elif 2 < step < 60:
                starting.append(loader.snapshot().stage("mine").starting)
                assert not loader.pipeline.worker_pids
            elif step == 60:
                may_start.set()
            elif step == 2 * len(expected[0]) // 3:
                while loader.snapshot().stage("mine").starting:
                    may_start.wait(0.01)

        assert all_of(loader, turn) == expected
        assert max(starting) >= 1
        assert loader.pipeline.restarts == 0


class _Killed(worker.Child):
    """The kernel kills it before it is weighed."""

    def __init__(self, *given):
        super().__init__(*given)
        self.kill()


def stop_from(number, monkeypatch):
    """All processes from this one on stand still as they start, and no start may take longer than a moment."""
    started = itertools.count()

    class Stopped(worker.Child):
        def __init__(self, *given):
            super().__init__(*given)
            if next(started) >= number:
                self.process.send_signal(signal.SIGSTOP)
                monkeypatch.setattr(worker, "_START_S", 0.01)

    monkeypatch.setattr(worker, "Child", Stopped)


@pytest.mark.parametrize("way", ["first start", "start beside threads", "start after a death"])
def test_a_stage_whose_process_starts_too_slowly_goes_back_to_threads(
    table, monkeypatch, capfd, way
):
    with loading(table, NAME + "shifted", Knobs()) as loader:
        expected = all_of(loader)
    stop_from(int(way == "start after a death"), monkeypatch)
    in_process = replace(PROCESS, prefetch_bytes=2**20, read_ahead_bytes=2**20)
    first = replace(in_process, backend={}) if "threads" in way else in_process
    with loading(table, NAME + "shifted", first, epochs=EPOCHS) as loader:

        def turn(step):
            if step == 2 and "threads" in way:
                loader.apply(in_process)
            elif step == 2:
                for pid in loader.pipeline.worker_pids:
                    os.kill(pid, signal.SIGKILL)
            while loader.snapshot().stage("mine").starting:
                threading.Event().wait(0.01)

        assert all_of(loader, turn) == expected
        assert loader.knobs.backend["mine"] == "thread"
        assert loader.limits.backends_of("mine") == ("thread",)
        assert not loader.pipeline.worker_pids
        with raises(KnobError, "'mine'", "'process'"):
            loader.apply(PROCESS)
    [line] = [line for line in capfd.readouterr().err.splitlines() if "threads" in line]
    assert_names(line, "stage 'mine'", "after 0.01 s")


def test_a_function_with_a_limit_ends_the_run_if_no_process_starts(table, monkeypatch):
    stop_from(0, monkeypatch)
    limited = Transform(NAME + "shifted", "mine", limit_s=5.0)
    with (
        loading(table, limited) as loader,
        raises(QuarantineError, "'mine'", "3 times", "after 0.01 s"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("change", [(Governor, "free", 2**20), (worker, "Child", _Killed)])
def test_a_process_that_does_not_fit_is_ended_while_it_starts(table, monkeypatch, change):
    monkeypatch.setattr(*change)
    with loading(table, NAME + "shifted", Knobs(), epochs=50) as loader:
        stream = (batch for _ in range(50) for batch in loader)
        next(stream)
        loader.apply(PROCESS)
        while not loader.snapshot().stage("mine").process_bytes:
            next(stream)
        for _ in range(50):
            next(stream)
            assert not loader.pipeline.worker_pids
        stream.close()


class _Stages:
    """Stages of transforms that share memory. Each process has its true size, which is known after it has worked. They
    see this as their governor."""

    base = 100

    def __init__(self, sizes, total):
        self.sizes = sizes
        self.total = total
        self.lock = threading.RLock()
        self.stages = [
            TransformStage(
                transform=Transform(NAME + "shifted", "mine"),
                backend="process",
                counters=None,
                governor=self,
                restarted=None,
                leave_processes=None,
                running={"mine": []},
            )
            for _ in sizes
        ]
        for stage in self.stages:
            stage.running["mine"] += self.stages

    def hold(self, size, outside=False):
        pass

    @property
    def free(self):
        return self.total - sum(len(s.workers()) * s.process_bytes for s in self.stages)

    def add(self, number):
        self.stages[number].start_worker()

    def measure(self, number):
        if self.stages[number].workers():
            self.stages[number].process_bytes = self.sizes[number]

    @property
    def used(self):
        return sum(
            len(stage.workers()) * size for stage, size in zip(self.stages, self.sizes, strict=True)
        )


@pytest.fixture
def unstarted(monkeypatch):
    """Neither processes nor shared memory: `id` does nothing that counts."""
    monkeypatch.setattr(worker.WorkerProcess, "start_in_background", id)
    monkeypatch.setattr(worker, "Region", id)


@pytest.mark.parametrize("seed", range(50))
def test_processes_of_many_stages_take_no_more_than_is_free(unstarted, seed):
    """Only the very first process may take more, because nothing is known before it."""
    draw = Random(seed)
    count = draw.randint(2, 8)
    size = draw.randint(1, 100)
    stages = _Stages([size] * count, total=draw.randint(0, 1000))
    for _ in range(200):
        number = draw.randrange(count)
        draw.choice([stages.add, stages.measure])(number)
        assert stages.used <= max(stages.total, size)
    if stages.total >= 100 * (count + 1):
        assert all(stage.workers() for stage in stages.stages)


def test_a_stage_gives_its_processes_back_when_it_goes_over_to_threads(table):
    with loading(table, NAME + "shifted", epochs=50) as loader:
        stream = (batch for _ in range(50) for batch in loader)
        while not loader.pipeline.worker_pids:
            next(stream)
        loader.apply(placed_in("thread"))
        assert loader.knobs.workers["mine"] == 1
        while loader.pipeline.worker_pids:
            next(stream)
        assert loader.pipeline.restarts == 0
        stream.close()


def test_a_process_is_weighed_and_the_next_one_is_charged_with_that(table, monkeypatch):
    charged, hold = [], Governor.hold

    def noted(self, change, outside=False):
        charged.append(change if outside else 0)
        hold(self, change, outside)

    monkeypatch.setattr(Governor, "hold", noted)
    with loading(table, NAME + "keep_100_mib", epochs=50) as loader:
        stream = (batch for _ in range(50) for batch in loader)
        while not loader.snapshot().stage("mine").process_bytes:
            next(stream)
        weighed = loader.snapshot().stage("mine").process_bytes
        assert 100 * 2**20 < weighed < 400 * 2**20
        first = len(charged)
        loader.apply(Knobs(workers={"mine": 2}))
        while max(charged[first:], default=0) < weighed:  # at once, not bit by bit as it takes it
            next(stream)
        stream.close()


def test_a_function_without_a_name_stays_in_threads(table):
    with loading(table, lambda columns: None, Knobs()) as loader:
        assert loader.limits.backends_of("mine") == ("thread",)
        with raises(KnobError, "'mine'", "'process'", "('thread',)"):
            loader.apply(PROCESS)


@pytest.mark.parametrize("name", ["no.such.module:f", NAME + "nothing", "__main__:f", "f"])
def test_a_name_that_leads_nowhere_is_refused_at_once(table, name):
    with raises(TransformError, "'mine'", name.partition(":")[0]):
        loading(table, name, Knobs())


@both
def test_only_the_columns_that_it_asks_for_reach_it(table, backend):
    few = Transform(NAME + "only_two", "mine", reads=("I1", "C1"))
    with loading(table, few, placed_in(backend)) as loader:
        batch = next(iter(loader))
        assert (batch.dense[:, 0] == 2).all()
        assert (batch.values.view(26, -1)[0] == 2).all()
        assert not (batch.values.view(26, -1)[1] == 2).all()


@both
def test_an_array_that_a_function_puts_in_anothers_place_counts(table, backend):
    with loading(table, lambda columns: None, Knobs()) as loader:
        before = next(iter(loader))
    with loading(table, NAME + "put_in_place", placed_in(backend)) as loader:
        batch = next(iter(loader))
    assert (batch["I1"] == 7).all()
    for name, array in {
        "I2": before["I3"],
        "I3": before["I2"],
        "C2": before["C1"],
        "C1": before["C1"] + 1,
    }.items():
        assert (batch[name] == array).all(), name


@pytest.fixture(scope="module")
def bags(tmp_path_factory):
    """Files with a column of bags, `b`, and one of numbers, `x`."""
    folder, chance = tmp_path_factory.mktemp("bags"), np.random.default_rng(0)
    table = {
        "label": chance.integers(0, 2, 2000),
        "x": chance.random(2000, np.float32),
        "b": [chance.integers(0, 99, size).tolist() for size in chance.integers(0, 5, 2000)],
    }
    write_rows(folder / "a.parquet", row_group_size=500, **table)
    return {"table": folder, "roles": {"label": "label", "dense": ["x"], "id_list": ["b"]}}


def loading_bags(bags, function, backend):
    knobs = placed_in(backend)
    return loading(bags["table"], NAME + function, knobs, roles=bags["roles"])


def test_bags_that_a_function_changes_are_the_same_in_both_back_ends(bags):
    """In place, in the dict or in the result, with other lengths or with the same ones."""
    batches = {}
    for backend in ("thread", "process"):
        with loading_bags(bags, "edit_bags", backend) as loader:
            batches[backend] = [
                (batch.values.tolist(), batch.lengths.tolist())
                for _ in range(4)
                for batch in loader
            ]
    assert len(batches["thread"]) == 100
    assert batches["thread"] == batches["process"]


@both
@pytest.mark.parametrize(
    "way",
    [
        "fewer lengths in place",
        "negative length in place",
        "more lengths",
        "fewer ids",
        "masked ids",
        "masked numbers",
    ],
)
def test_what_does_not_fit_is_refused_by_both_back_ends(bags, monkeypatch, backend, way):
    monkeypatch.setenv("SLUICE_TEST_WAY", way)
    with loading_bags(bags, "break_bags", backend) as loader:
        facts = ["mine", "x" if "numbers" in way else "b"] + ["masked"] * ("masked" in way)
        with raises(Exception, *facts):
            list(loader)


@both
def test_torch_has_one_thread_in_a_worker_and_as_many_as_before_in_others(table, backend):
    before, elsewhere = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        with loading(table, NAME + "threads_of_torch", placed_in(backend)) as loader:
            assert {float(value) for batch in loader for value in batch["I1"]} == {1.0}
        later = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (torch.get_num_threads(), elsewhere) == (3, [3])
    finally:
        torch.set_num_threads(before)


class TestFaults:
    def test_a_worker_killed_with_a_batch_is_replaced_and_nothing_is_lost(self, table, scene):
        with loading(table, NAME + "shifted", Knobs()) as loader:
            expected = all_of(loader)
        killed = threading.Thread(target=lambda: os.kill(scene.holders()[0], signal.SIGKILL))
        killed.start()
        with loading(table, NAME + "shifted_after_hold", epochs=EPOCHS) as loader:
            assert all_of(loader) == expected
            assert loader.pipeline.restarts == 1
        killed.join()

    def test_three_deaths_stop_the_run_with_file_row_group_and_signal(self, table, scene):
        with (
            loading(table, NAME + "crash") as loader,
            raises(
                QuarantineError,
                "row group",
                "'mine'",
                "epoch 0, step 0",
                "SIGSEGV",
                "on_error=quarantine",
            ) as caught,
        ):
            next(iter(loader))
        assert isinstance(caught.value.__cause__, WorkerCrashed)
        assert scene.attempts == 3

    def test_deaths_can_be_quarantined_as_well(self, table, scene, tmp_path):
        with loading(
            table,
            NAME + "crash",
            errors=quarantined(tmp_path),
        ) as loader:
            assert not next(iter(loader)).weight.any()
            assert loader.quarantined["rows_set_aside"] >= 80

    def test_a_hanging_worker_is_ended_after_the_limit(self, table, scene):
        slow = Transform(NAME + "shifted_after_hold", "mine", limit_s=0.5)
        with loading(table, slow) as loader:
            assert next(iter(loader)).rows == 80
            assert loader.pipeline.restarts == 1
        assert scene.attempts > 1

    def test_a_function_with_a_limit_never_runs_in_a_thread(self, table):
        limited = Transform(NAME + "shifted", "mine", limit_s=5.0)
        few = Knobs(prefetch_bytes=2**20, read_ahead_bytes=2**20)  # so that work is left
        with loading(table, limited, few, epochs=16) as loader:
            assert loader.limits.backends["mine"] == ("process",)
            assert not loader.limits.movable("mine", "process")
            batches = iter(loader)
            next(batches)
            assert loader.pipeline.worker_pids
            with raises(KnobError, "'mine'", "'thread'"):
                loader.apply(placed_in("thread"))

    def test_close_does_not_wait_for_a_hanging_worker(self, table, scene):
        loader = loading(table, NAME + "hold")
        with ThreadPoolExecutor(1) as consumer:
            taken = consumer.submit(lambda: next(iter(loader)))
            scene.holders()
            assert "hold" in loader.pipeline.stacks()
            loader.close()
            with raises(Exception, "closed"):
                taken.result(60)
        assert loader.pipeline.gone, "no thread is left"

    def test_all_workers_killed_and_killed_again(self, table):
        with loading(table, NAME + "shifted", Knobs()) as loader:
            expected = all_of(loader)
        kills = 0
        with loading(
            table,
            NAME + "shifted",
            Knobs(
                workers={"mine": 2},
                backend={"mine": "process"},
                prefetch_bytes=2**20,
                read_ahead_bytes=2**20,
            ),
            epochs=EPOCHS,
        ) as loader:

            def strike(step):
                nonlocal kills
                if kills < 4:
                    for pid in loader.pipeline.worker_pids:
                        with suppress(ProcessLookupError):  # killed before, and just taken away
                            os.kill(pid, signal.SIGKILL)
                            kills += 1

            assert all_of(loader, strike) == expected
            assert kills


class TestMemory:
    @both
    def test_what_does_not_fit_is_tried_again_alone(self, table, scene, backend):
        with loading(table, NAME + "shifted", Knobs()) as loader:
            expected = [contents(batch) for batch in loader]
        knobs = placed_in(backend)
        with loading(table, NAME + "shifted_without_memory_at_first", knobs) as loader:
            assert [contents(batch) for batch in loader] == expected
            assert loader.pipeline.restarts == 0
        assert scene.attempts == len(expected) + 1

    @both
    def test_what_does_not_fit_even_alone_is_named_with_what_there_was(
        self, table, scene, backend, tmp_path
    ):
        with (
            loading(
                table,
                NAME + "boundless",
                placed_in(backend),
                errors=quarantined(tmp_path),
            ) as loader,
            pytest.raises(
                QuarantineError,
                match=r"parquet row group \d+ rows .*'mine'.*epoch 0, step 0: out of memory, "
                r"also when tried again alone with [\d.]+ .iB free.*MemoryError is an error of",
            ),
        ):
            next(iter(loader))
        assert scene.attempts == 2


class TestRows:
    @both
    def test_the_error_names_file_row_group_and_row(self, table, backend):
        files = twin.Table(table.files_of("train"))
        with (
            loading(table, NAME + "fails_on_odd_labels", placed_in(backend)) as loader,
            raises(
                QuarantineError,
                "row group",
                "row",
                "'mine'",
                "ValueError: a label is 1",
                "on_error=quarantine",
            ) as caught,
        ):
            next(iter(loader))
        words = str(caught.value).split()
        number = next(n for n, f in enumerate(table.files_of("train")) if f.path == words[0])
        assert files.groups[number, int(words[3])]["label"][int(words[5].rstrip(":"))] == 1

    @both
    def test_quarantined_rows_keep_their_places_with_weight_0(self, table, backend, tmp_path):
        files, path = twin.Table(table.files_of("train")), tmp_path / "aside"
        few = Transform(NAME + "fails_on_odd_labels", "mine", reads=("I1", "label"))
        errors = quarantined(tmp_path)
        with loading(
            table,
            few,
            placed_in(backend),
            errors=errors,
            last="pad",
            batch_size=320,
            window_rows=300,
        ) as loader:
            bad = set()
            for batch, rows in zip(loader, twin.batches(loader.plan, 0), strict=True):
                label, real = (
                    table_column(files, "label", rows),
                    np.array([row is not None for row in rows]),
                )
                np.testing.assert_array_equal(batch.label.numpy(), label)
                np.testing.assert_array_equal(
                    batch.weight.numpy(), (real & (label == 0)).astype("f4")
                )
                np.testing.assert_array_equal(
                    batch.dense[:, 0].numpy(), table_column(files, "I1", rows) + (label == 0)
                )
                bad |= {row for row, value in zip(rows, label, strict=True) if value == 1}
            summary = loader.quarantined
        lines = quarantined_rows(path)
        names = [f.path for f in table.files_of("train")]
        assert {(names.index(x["file"]), x["row_group"], x["row"]) for x in lines} == bad
        assert len(lines) == len(bad) == summary["rows_set_aside"] > 100

    @both
    def test_errors_of_the_program_are_never_quarantined(self, table, backend, tmp_path):
        with (
            loading(
                table,
                NAME + "no_such_name",
                placed_in(backend),
                errors=quarantined(tmp_path),
            ) as loader,
            pytest.raises(QuarantineError, match="NameError is an error of the program"),
        ):
            next(iter(loader))
        assert not (tmp_path / "aside").exists()

    def test_too_many_stop_the_run(self, table, tmp_path):
        with (
            loading(
                table,
                NAME + "fails_on_odd_labels",
                Knobs(),
                errors=quarantined(tmp_path, max_rows=20),
            ) as loader,
            raises(QuarantineError, "'mine'", "max_rows=20"),
        ):
            deque(loader, maxlen=0)


def table_column(files, name, rows):
    return files.column(name, rows).astype("f4")
