"""Any sequence of takes, resizes, switches, fusions, kills and new starts, against a list of what has to come."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from sluice.ingest.knobs import Knobs
from sluice.ingest.stages.transform import Transform
from tests.open_loader import open_loader

pytestmark = pytest.mark.slow

EPOCHS = 3
_KILLS = 6  # well below what the restart budget allows
OPTIONS = {"batch_size": 80, "window_rows": 60, "epochs": EPOCHS, "last": "pad"}


def seen(batch):
    return (
        batch.epoch,
        batch.step,
        batch.rows,
        batch.checksum,
        float(batch.dense.sum()),
        int(batch.values.sum()),
    )


def loading(table, knobs=None):
    stages = [
        Transform("tests.ingest.worker_functions:shifted", "mine"),
        Transform("tests.ingest.worker_functions:twice", "next"),
    ]
    return open_loader(table, transforms=stages, knobs=knobs, **OPTIONS)


class Running(RuleBasedStateMachine):
    """`table` and `expected` are set by the test: batches of each epoch."""

    table: ClassVar[Any] = None
    expected: ClassVar[list[Any]] = []
    killed_in_all: ClassVar[int] = 0

    def __init__(self):
        super().__init__()
        self.loader = loading(
            self.table,
            Knobs(backend={"mine": "process"}, prefetch_bytes=2**20, read_ahead_bytes=2**20),
        )
        self.epoch = self.step = self.killed = 0
        self.batches = None

    @precondition(lambda self: self.epoch < EPOCHS)
    @rule(count=st.integers(1, 20))
    def get(self, count):
        for _ in range(count):
            self.batches = self.batches or iter(self.loader)
            batch = next(self.batches, None)
            if batch is None:
                assert self.step == len(self.expected[self.epoch]), "nothing is lost"
                self.epoch, self.step, self.batches = self.epoch + 1, 0, None
                return
            assert seen(batch) == self.expected[self.epoch][self.step]
            self.step += 1

    @rule(data=st.data())
    def resize(self, data):
        limits = self.loader.limits.workers
        self.loader.apply(
            Knobs(
                workers={
                    stage: data.draw(st.integers(low, min(high, 4)))
                    for stage, (low, high) in limits.items()
                },
                read_ahead_bytes=data.draw(st.sampled_from([2**20, 2**24])),
                prefetch_bytes=data.draw(st.sampled_from([2**20, 2**24])),
            )
        )

    @rule(backend=st.sampled_from(["thread", "process"]))
    def switch(self, backend):
        self.loader.apply(
            Knobs(workers=self.loader.knobs.workers, backend={"mine": backend, "next": "thread"})
        )

    @rule(backend=st.sampled_from(["thread", "process"]))
    def fuse(self, backend):
        """A resize or a switch splits them again."""
        self.loader.apply(
            Knobs(
                workers=self.loader.knobs.workers,
                backend={"mine": backend, "next": backend},
                fused={"next"},
            )
        )

    @rule(every=st.booleans())
    def kill(self, every):
        for pid in self.loader.worker_pids[: None if every else 1]:
            if self.killed < _KILLS:
                self.killed += 1
                Running.killed_in_all += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @precondition(lambda self: self.epoch < EPOCHS)
    @rule()
    def go_on_in_another_loader(self):
        state = self.loader.state_dict()
        if self.batches is not None:
            self.batches.close()
        self.loader.close()
        self.loader.close()
        self.loader, self.batches = loading(self.table, self.loader.knobs), None
        self.loader.load_state_dict(state)
        if self.step == len(self.expected[self.epoch]):  # the epoch's end was not asked for yet
            self.epoch, self.step = self.epoch + 1, 0

    def teardown(self):
        if self.batches is not None:
            self.batches.close()
        self.loader.close()
        assert self.loader._pipeline.gone
        assert not self.loader.worker_pids


@pytest.fixture
def expected(table):
    with loading(table) as loader:
        return [[seen(batch) for batch in loader] for _ in range(EPOCHS)]


def test_no_sequence_of_events_loses_repeats_or_reorders_anything(table, expected):
    assert len(set(itertools.chain(*expected))) == EPOCHS * len(expected[0])
    Running.table, Running.expected = table, expected
    run_state_machine_as_test(
        Running,
        settings=settings(
            max_examples=10,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Running.killed_in_all > 0
