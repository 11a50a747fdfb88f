"""What the loop measures and when it stops, with a made-up clock and a model that does nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlrm.config import Config
from dlrm.guard import Guard
from dlrm.meta import Meta
from dlrm.trainer import NotANumber, Timing, Trainer
from tests.dlrm.rig import DENSE, SIZES, batch

ROWS = 8


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowFeed:
    """Takes 3 s for its first batch and 2 s for each other one."""

    def __init__(self, clock: Clock, steps: int) -> None:
        self._clock, self._steps = clock, steps
        self.epoch = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self):
        for step in range(self._steps):
            self._clock.now += 2 if step else 3
            self.epoch += step + 1 == self._steps
            yield batch(step, ROWS)

    def state_dict(self):
        return {"epoch": self.epoch}


class SlowTrainer(Trainer):
    """Takes 6 s for a step, and 100 s for a checkpoint."""

    loss = 0.5

    def _step(self, _batch):
        self._clock.now += 6  # type: ignore[attr-defined]
        return torch.tensor(self.loss)

    def _save(self, meta, feed):
        self._clock.now += 100  # type: ignore[attr-defined]
        return replace(meta, epoch=feed.state_dict()["epoch"])


class Alone:
    """The world of one rank, without a process group."""

    ranks, device = 1, torch.device("cpu")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def run(steps: int, *, epochs: int = 1, log_every: int = 2, stop_at: int | None = None, loss: float = 0.5):
    clock, lines = Clock(), []
    config = Config(data="fake", version=0, batch_size=ROWS, epochs=epochs, log_every=log_every)
    trainer = SlowTrainer(config=config, world=Alone(), model=None, dense=None,  # type: ignore[arg-type]
                          guard=Guard(SIZES, DENSE, "fake"), names=list(SIZES), checkpoints=Path("none"),
                          record=lambda _: None, observe=lines.append, clock=clock,
                          asked_to_stop=lambda: stop_at is not None and clock.now >= stop_at)
    trainer.loss = loss
    meta = Meta(config={}, version=0, fingerprint={}, columns=SIZES, dense=tuple(DENSE))
    return trainer.train(SlowFeed(clock, steps), meta, lambda _: None), lines


def test_the_stall_is_the_wait_in_next_alone():
    """5 steps wait 4 × 2 s (the first batch, 3 s, is told apart) and compute 5 × 6 s; saving counts nowhere."""
    outcome, lines = run(5)
    assert outcome.first_batch_s == 3
    assert outcome.timing.wait_s == 8
    assert outcome.timing.compute_s == 30
    assert outcome.timing.stall == pytest.approx(8 / 38)
    assert outcome.timing.samples_per_s == pytest.approx(5 * ROWS / 38)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert lines[1]["stall"] == pytest.approx(4 / 16)


def test_the_time_of_ranks_is_a_mean_and_their_rows_a_sum():
    timing = Timing()
    timing.add(rows=100, wait_s=2, compute_s=18, ranks=2)
    assert timing.seconds == 10
    assert timing.samples_per_s == 10
    assert timing.stall == 0.1


def test_all_steps_of_all_epochs_are_counted():
    outcome, lines = run(3, epochs=2)
    assert (outcome.meta.step, outcome.meta.epoch, outcome.meta.rows) == (6, 2, 6 * ROWS)
    assert lines[-1]["step"] == 6
    assert not outcome.stopped


def test_a_request_to_stop_is_answered_at_the_next_agreement():
    outcome, lines = run(100, log_every=4, stop_at=20)
    assert outcome.stopped
    assert (outcome.meta.step, outcome.meta.epoch) == (4, 0)
    assert len(lines) == 1


def test_a_stop_at_the_end_of_an_epoch_counts_the_epoch():
    outcome, _ = run(4, epochs=3, log_every=4, stop_at=20)
    assert outcome.stopped
    assert (outcome.meta.step, outcome.meta.epoch) == (4, 1)


def test_a_loss_that_is_no_number_ends_the_run_with_advice():
    with pytest.raises(NotANumber, match="at step 2; try a lower --lr"):
        run(4, loss=float("nan"))
