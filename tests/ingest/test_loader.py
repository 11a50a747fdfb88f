"""The loader against its slow twin, and what it promises to a training loop."""

import itertools
import json
import os
import re
import threading
from collections import deque

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.small_table import small_table
from sluice import Knobs, Transform
from tests.etl.tables import write_rows
from tests.ingest import twin
from tests.open_loader import open_loader
from tests.product import (
    BatchLoader,
    KnobError,
    LoaderError,
    Machine,
    MemoryGroup,
    MemoryLimitError,
    ParquetFiles,
    PlanError,
    Position,
    SourceError,
    TransformError,
)
from tests.raises import raises

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("reader", "last", "shuffle", "ranks", "batch_size", "window_rows"),
    [
        ("arrow", "drop", True, 1, 96, None),
        ("petastorm", "pad", True, 2, 64, 300),
        ("arrow", "pad", False, 4, 1000, 100),
        ("petastorm", "drop", True, 1, 8, 256),
        ("arrow", "pad", True, 1, 8000, 50),
    ],
)
def test_rows_and_order_are_those_of_the_twin(  # noqa: PLR0917
    table, reader, last, shuffle, ranks, batch_size, window_rows
):
    files = twin.Table(table.files_of("train"))
    for rank in range(ranks):
        with open_loader(
            table,
            batch_size=batch_size,
            rank=rank,
            ranks=ranks,
            epochs=2,
            seed=3,
            last=last,
            shuffle=shuffle,
            window_rows=window_rows,
            reader=reader,
        ) as loader:
            for epoch in range(2):
                expected = twin.batches(loader.plan, epoch, rank, ranks)
                got = 0
                for batch, rows in zip(loader, expected, strict=True):
                    assert (batch.epoch, batch.step) == (epoch, got)
                    twin.expect(loader, files, batch, rows)
                    got += 1
                assert got == len(loader)


@pytest.mark.parametrize(("shuffle", "ranks"), [(True, 1), (True, 2), (False, 2)])
def test_a_row_of_a_batch_is_found_in_its_file(tmp_path, shuffle, ranks):
    """By its place in the plan, whatever its values are; rows that only fill the batch are nowhere."""
    table = small_table(tmp_path / "t", rows=700, row_group_rows=100, files=3, number_rows=True)
    for rank in range(ranks):
        with open_loader(
            table, batch_size=64, rank=rank, ranks=ranks, last="pad", shuffle=shuffle
        ) as loader:
            column = loader.dense_names.index("I1")
            for batch in loader:
                for row in range(0, len(batch), 5):
                    place = loader.place_of(batch.epoch, batch.step, row)
                    if not batch.weight[row]:
                        assert not place
                        continue
                    path, group, at = re.fullmatch(
                        r"(.*), row group (\d+), row (\d+)", place
                    ).groups()
                    stored = pq.ParquetFile(path).read_row_group(int(group), columns=["I1"])["I1"]
                    assert stored[int(at)].as_py() == batch.dense[row, column]


def test_a_run_resumes_at_any_step_with_other_workers_and_ranks(table):
    files = twin.Table(table.files_of("train"))
    options = {"batch_size": 200, "epochs": 2, "last": "pad", "reader": "arrow", "window_rows": 300}
    with open_loader(table, **options) as loader:
        states, expected = [loader.state_dict()], []
        for epoch in range(2):
            expected += twin.batches(loader.plan, epoch)
            states += [loader.state_dict() for _ in loader]
        steps, last_hash = len(loader), loader.order_hash
    for at in range(0, len(states) - 1, 3):
        state = json.loads(json.dumps(states[at]))
        with open_loader(table, knobs=Knobs(workers={"decode": 3}), **options) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            batch = next(iter(loader))
            assert (batch.epoch, batch.step) == divmod(at, steps)
            twin.expect(loader, files, batch, expected[at])
        for rank in range(2):
            with open_loader(table, rank=rank, ranks=2, **options) as loader:
                loader.load_state_dict(state)
                twin.expect(
                    loader, files, next(iter(loader)), expected[at][rank * 100 : rank * 100 + 100]
                )
    with open_loader(table, **options) as loader:
        loader.load_state_dict(states[steps + 2])
        deque(loader, maxlen=0)
        assert loader.order_hash == last_hash  # of the whole epoch, not of the part after the cut
    with open_loader(table, **options) as loader:
        loader.load_state_dict(states[3])
        assert [[batch.step for batch in loader] for _ in range(2)] == [
            list(range(3, steps)),
            list(range(steps)),
        ]


@pytest.mark.parametrize("damaged", ["v0", 3, None, [["version", 0]]])
def test_a_state_that_names_no_table_is_refused(table, damaged):
    with open_loader(table, batch_size=80) as loader:
        state = {**loader.state_dict(), "table": damaged}
        with raises(LoaderError, "other rows", "version"):
            loader.load_state_dict(state)


def test_a_state_that_release_0_2_0_wrote_goes_on_at_its_row(table):
    """The hash of the whole epoch is the one that release 0.2.0 had."""
    state = (
        '{"epoch": 0, "step": 8, "batch_size": 80, "seed": 0, "streams": 8, "window_rows": 32768, "shuffle": true, '
        '"last": "drop", "rows": 4000, "row_groups": 16, "plan": "c19de76b39098b94", "table": {"version": 0, '
        '"split": "train"}, "order": "4855d2cffd0026de"}'
    )
    with BatchLoader(table, batch_size=80) as loader:
        loader.load_state_dict(json.loads(state))
        assert [batch.step for batch in loader] == list(range(8, 50))
        assert loader.order_hash == "58e121966000f7fc"


def test_a_state_of_another_version_or_order_is_refused(table):
    with BatchLoader(table, batch_size=80) as loader:
        state = loader.state_dict()
        with raises(LoaderError, "version", 9, 0):
            loader.load_state_dict({**state, "table": {"version": 9, "split": "train"}})
    with (
        BatchLoader(table, batch_size=80, seed=1) as loader,
        raises(PlanError, "seed", 0, 1),
    ):
        loader.load_state_dict(state)


def test_a_broken_off_epoch_is_followed_by_the_next(table):
    with open_loader(table, batch_size=80, epochs=3) as loader:
        orders = [(list(loader), loader.order_hash)[1] for _ in range(2)]
    with open_loader(table, batch_size=80, epochs=3) as loader:
        assert [(b.epoch, b.step) for b in itertools.islice(loader, 3)] == [(0, 0), (0, 1), (0, 2)]
        state, batches = loader.state_dict(), iter(loader)
        assert [next(batches).epoch for _ in range(2)] == [1, 1]
        loader.load_state_dict(state)  # which goes back within an epoch that is under way
        for epoch in (0, 1, 2, 3):  # more than it was made for
            assert {b.epoch for b in loader} == {epoch}
            assert epoch > 1 or loader.order_hash == orders[epoch]


def test_taking_just_the_batches_of_an_epoch_leads_to_the_next(table, monkeypatch):
    """As Lightning does, which counts to `len(loader)` and never asks for the end."""
    with BatchLoader(table, batch_size=80, read_ahead_epochs=3) as loader:
        begun, start = [], loader.pipeline.start
        monkeypatch.setattr(
            loader.pipeline, "start", lambda *where: begun.append(where) or start(*where)
        )
        for epoch in range(4):  # more than it was made for
            assert {b.epoch for b in itertools.islice(loader, len(loader))} == {epoch}
            assert loader.plan.position(loader.state_dict()) == Position(epoch + 1, 0)
            assert loader.order_hash is not None
        assert begun == [
            (Position(0, 0), 3),
            (Position(3, 0), 4),
        ]  # within what was read ahead, nothing began anew
        assert loader.pipeline._governor.charged == 0


def test_two_iterations_at_once_are_refused(table):
    with BatchLoader(table, batch_size=80) as loader:
        first = iter(loader)
        next(first)
        next(iter(loader))
        with raises(LoaderError, "iteration"):
            next(first)


def test_a_batch_that_is_held_is_not_written_again(table):
    def values(batch):
        return [part.tolist() for part in (batch.dense, batch.values, batch.label, batch.weight)]

    with open_loader(table, batch_size=80, epochs=2) as loader:
        held = list(itertools.chain(loader, loader))
        before = list(map(values, held))
        deque(loader, maxlen=0)
    assert list(map(values, held)) == before
    assert len({b.values.data_ptr() for b in held}) == len(held)


def test_tensors_are_laid_out_feature_by_feature(table):
    with BatchLoader(table, batch_size=80, ranks=2, rank=1) as loader:
        batch = next(iter(loader))
        assert batch.dense.shape == (40, 13)
        assert batch.dense.stride() == (1, 40)
        assert batch.values.shape == batch.lengths.shape == (26 * 40,)
        assert batch.values.is_contiguous()
        assert batch.values.dtype == torch.int32
        assert batch.dense.dtype == batch.label.dtype == torch.float32


class TestSnapshots:
    def test_counters_grow_and_survive_a_new_start(self, table):
        with BatchLoader(table, batch_size=80, read_ahead_epochs=5) as loader:
            snapshots = [loader.snapshot()]
            for _ in range(3):
                deque(itertools.islice(loader, 10), maxlen=0)
                snapshots.append(loader.snapshot())
        for before, after in itertools.pairwise(snapshots):
            assert after.sequence == before.sequence + 1
            assert after.rows == before.rows + 800
            assert after.at > before.at
            assert after.cpu_used_s >= before.cpu_used_s
            for then in before.stages:
                now = after.stage(then.name)
                for counter in ("items", "rows", "bytes", "busy_s", "cpu_s", "wait_input_s"):
                    assert getattr(now, counter) >= getattr(then, counter)
        assert [s.name for s in snapshots[-1].stages] == ["decode"]
        assert all(s.rows > 0 and s.busy_s > 0 for s in snapshots[-1].stages)
        assert snapshots[-1].consumer_wait_s > 0

    def test_fetching_and_decoding_have_workers_and_figures_of_their_own(self, table):
        knobs = Knobs(workers={"decode": 1, "fetch": 4})
        with BatchLoader(f"latency://0ms{table.uri}", batch_size=80, knobs=knobs) as loader:
            deque(loader, maxlen=0)
            fetch, decode, *_ = loader.snapshot().stages
            pools = loader.pipeline._pools
            assert loader.pipeline._governor.charged == 0
            planned = len(loader.plan.schedule(0).reads)
        assert (pools["fetch"]._started, pools["decode"]._started) == (4, 1)
        assert (fetch.name, fetch.workers, decode.workers) == ("fetch", 4, 1)
        assert fetch.items == decode.items == planned
        assert fetch.bytes < decode.bytes, "stored, and decoded"

    def test_cores_that_come_and_go_are_seen_at_the_next_look(self, table):
        class Changing(Machine):
            now = 2.0

            def cores(self):
                return self.now

        machine = Changing()
        with BatchLoader(table, batch_size=80, machine=machine) as loader:
            small = loader.limits.workers["decode"][1]
            machine.now = 0.5
            assert loader.snapshot().cpu_quota == 0.5
            assert loader.limits.workers["decode"][1] == small
            machine.now = 64.0
            assert loader.snapshot().cpu_quota == 64.0
            assert loader.limits.workers["decode"][1] == 8 * small
            loader.apply(loader.knobs.with_workers(decode=8 * small))

    def test_knobs_outside_the_limits_are_refused_and_change_nothing(self, table):
        with BatchLoader(table, batch_size=80) as loader:
            before = loader.knobs
            with raises(KnobError, "'decode'", 4096, "1 to"):
                loader.apply(Knobs(workers={"decode": 4096}))
            with pytest.raises(KnobError, match=r"no stage 'decdoe' .did you mean 'decode'"):
                loader.apply(Knobs(workers={"decdoe": 5}))
            assert loader.knobs == before


class TestTransforms:
    def test_they_run_in_order_on_columns_by_name(self, table):
        def double(columns):
            columns["I1"] *= 2  # in place

        def swap(columns):
            return {"I2": columns["I1"] + 1, "C1": columns["C2"].astype(np.int64)}

        with (
            BatchLoader(table, batch_size=80) as plain,
            BatchLoader(table, batch_size=80, transforms=[double, swap]) as loader,
        ):
            expected, batch = next(iter(plain)), next(iter(loader))
            assert loader.snapshot().stages[1].name == "double+swap"
        assert torch.equal(batch["I1"], expected["I1"] * 2)
        assert torch.equal(batch["I2"], expected["I1"] * 2 + 1)
        assert torch.equal(batch["C1"], expected["C2"])

    def test_a_name_that_is_taken_is_refused(self, table):
        with raises(TransformError, "2 stages", "decode"):
            BatchLoader(table, batch_size=80, transforms=[("decode", lambda c: None)])


class SteadyMachine(Machine):
    """This machine, but for a memory use that tests can count on."""

    def memory_used(self) -> int:
        return 2**30


class TestMemory:
    def test_a_limit_below_the_windows_is_refused_with_one_that_will_do(self, table):
        options = {"batch_size": 80, "machine": SteadyMachine()}
        with open_loader(table, **options) as loader:
            least = loader.pipeline.least_limit
        with raises(MemoryLimitError, f"{least} bytes"):
            open_loader(
                table, memory_limit=least - 2**30 // 256 - 1, **options
            )  # starts differ by such a part
        with open_loader(table, memory_limit=least, **options) as loader:
            assert len(list(loader)) == len(loader)

    def test_a_group_that_other_processes_fill_counts_with_all_of_its_memory(self, table, tmp_path):
        (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")

        class Shared(SteadyMachine):
            def memory_group(self):
                return MemoryGroup(version=2, folder=tmp_path, limit=4 * 2**30)

        least = []
        for machine in (SteadyMachine(), Shared()):
            with open_loader(table, batch_size=80, machine=machine) as loader:
                least.append(loader.pipeline.least_limit)
        assert least[1] - least[0] == 2 * 2**30

    def test_with_the_least_memory_all_rows_come_in_order(self, table):
        def of(limit):
            with open_loader(
                table,
                batch_size=80,
                epochs=2,
                memory_limit=limit,
                machine=SteadyMachine(),
                knobs=Knobs(workers={"decode": 4}),
                window_rows=300,
            ) as loader:
                deque(loader, maxlen=0)
                return loader.order_hash, loader.snapshot(), loader.pipeline.least_limit

        order, free, least = of(None)
        same_order, tight, _ = of(least)
        assert same_order == order
        assert tight.held_back > 0
        assert 0 == tight.memory_free < free.memory_free <= free.memory_limit


class TestEnds:
    def test_a_fork_leaves_the_pipeline_to_its_parent(self, table):
        transforms = [Transform("tests.ingest.remote.functions:halved", "mine")]
        knobs = Knobs(backend={"mine": "process"})
        options = {"batch_size": 80, "fill": 0.0, "transforms": transforms, "knobs": knobs}
        with open_loader(table, **options) as loader:
            batches = iter(loader)
            rows = next(batches).rows
            fork = os.fork()
            if fork == 0:
                loader.close()
                os._exit(0)
            assert os.waitpid(fork, 0)[1] == 0
            rows += sum(batch.rows for batch in batches)
            assert rows == loader.plan.rows
            assert loader.snapshot().restarts == 0


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"reader": "csv"}, SourceError, ("'csv'", "petastorm, arrow")),
        ({"epochs": 0}, LoaderError, ("epochs", 0)),
        ({"split": "tarin"}, ValueError, ("'tarin'", "test, train, validation")),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(table, options, error, facts):
    with raises(error, *facts):
        open_loader(table, batch_size=80, **options)


@pytest.mark.parametrize(("rows", "ranks"), [(17, 8), (3, 8), (5, 16)])
def test_a_rank_without_rows_in_the_last_batch_has_its_batch_of_padding(tmp_path, rows, ranks):
    """Also where a run is resumed at that batch, and where there are fewer rows than ranks."""
    path = str(tmp_path / "part.parquet")
    write_rows(
        path,
        row_group_size=5,
        label=np.zeros(rows, np.float32),
        x=np.arange(rows, dtype=np.float32),
        a=np.arange(rows, dtype=np.int32),
    )
    source = ParquetFiles.open([path], {"label": "label", "dense": "x", "sparse": "a"})
    files, empty = twin.Table(source.files), 0
    for rank in range(ranks):
        with open_loader(
            source,
            batch_size=max(8, ranks),
            rank=rank,
            ranks=ranks,
            last="pad",
            reader="arrow",
        ) as loader:
            expected, states = twin.batches(loader.plan, 0, rank, ranks), [loader.state_dict()]
            for batch, wanted in zip(loader, expected, strict=True):
                twin.expect(loader, files, batch, wanted)
                states.append(loader.state_dict())
                empty += batch.rows == 0
            whole = loader.order_hash
            for step, state in enumerate(states[:-1]):
                loader.load_state_dict(state)
                for batch, wanted in zip(loader, expected[step:], strict=True):
                    twin.expect(loader, files, batch, wanted)
                assert loader.order_hash == whole
    assert empty, "there is such a rank"


def test_a_loader_that_is_closed_says_so_and_not_that_its_store_was(table):
    """Closing interrupts the reads first: their errors may come to the consumer before the end does."""
    reading, waiting, interrupted, failed = (threading.Event() for _ in range(4))
    errors = []

    def decoded(*_place, **_how):
        reading.set()
        assert interrupted.wait(60)
        raise SourceError("the store was closed")

    def begun(iteration):
        run = begin(iteration)
        waiting.set()  # from here on another thread closes: the consumer would wait for itself
        return run

    def consume():
        try:
            next(iter(loader))
        except Exception as error:
            errors.append(error)
        failed.set()

    loader = BatchLoader(table, batch_size=80)
    loader._input.groups.decoded = decoded
    begin, loader._start_epoch = loader._start_epoch, begun
    loader._input.groups.interrupt = lambda: (interrupted.set(), failed.wait(60))
    consumer = threading.Thread(target=consume)
    consumer.start()
    assert reading.wait(60)
    assert waiting.wait(60)
    loader.close()
    assert failed.is_set(), "by the error of its read, and while the loader was being closed"
    consumer.join()
    assert [type(error) for error in errors] == [LoaderError]
    assert "closed" in str(errors[0])
    loader.close()
    with raises(LoaderError, "closed"):
        iter(loader)
