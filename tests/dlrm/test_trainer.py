"""What the loop measures and when it stops, with a made-up clock and a model that does nothing."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sluice.dlrm.training.finite_guard import FiniteGuard
from sluice.dlrm.training.step_figures import late_rank, slow_rank
from tests.dlrm.rig import DENSE, META, SIZES, Alone, batch
from tests.product import (
    BatchChecker,
    Config,
    NotANumber,
    StepFigures,
    SyncedBatches,
    Trainer,
)
from tests.raises import raises

ROWS = 8


class Clock:
    """`own` is the time in steps alone."""

    now = own = 0.0

    def __call__(self) -> float:
        return self.now


class SlowFeed:
    """Takes 3 s for its first batch and 2 s for each other one."""

    def __init__(self, clock: Clock, steps: int) -> None:
        self._clock, self._steps = clock, steps
        self.epoch = self.step = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self):
        for step in range(self._steps):
            self._clock.now += 2 if step else 3
            self.epoch += step + 1 == self._steps
            self.step = (step + 1) % self._steps
            yield batch(step, ROWS)

    order_hash = ""
    resting = nullcontext

    def state_dict(self):
        return {"epoch": self.epoch, "step": self.step}


class SlowTrainer(Trainer):
    """Takes 6 s for a step; its checkpoints take 100 s."""

    loss = 0.5

    def _set_first_bias(self, _batch):
        pass

    def _step(self, step, number):
        self.clock.now += 6  # type: ignore[attr-defined]
        self.clock.own += 6  # type: ignore[attr-defined]
        loss = torch.tensor(self.loss)
        left_out = self.guard.skips and not self.guard.admits(
            number + 1, (0, step.batch.step), loss
        )
        return None if left_out else loss


class WithAnother(Alone):
    """A world with a second rank. It waits 6 s of the 12 s of each step for input, and computes for 1.5 s. So this rank
    waits 4 s for it."""

    ranks = 2
    clock: Clock

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.clock.now += 4
        return 2 * values

    def gather_objects(self, value, _group=None):
        steps = value[1] / ROWS
        other = [SlowTrainer.loss * ROWS, ROWS, 6.0, 6.0, 0.0, 1.5]
        return [*super().gather_objects(value), [steps * figure for figure in other]]


def run(
    steps: int,
    *,
    epochs: int = 1,
    log_every: int = 2,
    stop_at: int | None = None,
    loss: float = 0.5,
    good_at: int | None = None,
    world: type[Alone] = Alone,
    begun: Mapping[str, Any] | None = None,
    behind: bool = False,
    reached: bool = False,
    **settings,
):
    """What came of it, the log's lines, and the steps of what was saved and evaluated, in their order."""
    clock, lines, done = Clock(), [], []
    here = world()
    here.clock = clock
    config = Config(
        data="fake", version=0, batch_size=ROWS, epochs=epochs, log_every=log_every, **settings
    )

    def evaluate(meta):
        done.append(("evaluated", meta.step))
        return meta.step == good_at

    def save(meta):
        clock.now += 100
        done.append(("saved", meta.step))

    trainer = SlowTrainer(
        config=config,
        meta=replace(META, **(begun or {})),
        world=here,
        parts=None,
        feed=SlowFeed(clock, steps),
        checker=BatchChecker(SIZES, DENSE, "fake"),
        checkpoints=SimpleNamespace(save=save),
        validator=SimpleNamespace(
            evaluate_and_check=evaluate, is_behind=lambda: behind, has_reached=lambda: reached
        ),
        journal=SimpleNamespace(
            metric=lines.append,
            event=lambda _: None,
            warn=lambda *_: None,
            say=lambda _: None,
        ),
        clock=clock,
        own_clock=lambda: clock.own,
        figures=StepFigures(here, ["host0", "host1"], memory_used=lambda: 7),
        synced_batches=SyncedBatches(
            here, lambda: stop_at is not None and clock.now >= stop_at, clock
        ),
    )
    trainer.loss = loss
    trainer.train()
    return trainer, lines, done


def test_the_stall_is_the_wait_in_next_alone():
    """5 steps wait 4 × 2 s (the first batch, 3 s, is told apart) and compute 5 × 6 s; saving counts nowhere."""
    trainer, lines, _ = run(5)
    figures = trainer.figures
    assert (figures.first_batch_s, figures.wait_s, figures.compute_s) == (3, 8, 30)
    assert figures.stall == pytest.approx(8 / 38)
    assert figures.samples_per_s == pytest.approx(5 * ROWS / 38)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert lines[1]["stall"] == pytest.approx(4 / 16)


def test_the_rank_that_others_wait_for_is_named_with_its_own_wait_for_input():
    hosts = ["host0", "host0", "host1"]
    late = late_rank([[0.1, 0.0, 6.0], [9.9, 10.0, 4.0], [5.0, 4.0, 0.5]], hosts)["late"]
    assert (late["rank"], late["host"]) == (2, "host1")
    assert (late["others"], late["input"]) == pytest.approx((0.4, 0.6))


def test_no_rank_is_late_if_all_wait_for_each_other_or_there_is_one():
    assert late_rank([[0.0, 0.0], [10.0, 10.0], [3.0, 3.9]], ["a", "b"]) == {}
    assert late_rank([[9.0], [1.0], [0.5]], ["a"]) == late_rank([[0.0]] * 3, ["a"]) == {}


def test_the_rank_that_computes_longest_is_named_with_how_many_times_as_long():
    hosts = ["host0", "host0", "host1", "host2"]
    slow = slow_rank([2.0, 3.0, 6.9, 4.0], 8.0, hosts)["slow"]
    assert (slow["rank"], slow["host"]) == (2, "host1")
    assert slow["times"] == pytest.approx(2.3)
    assert slow_rank([2.0, 5.0], 8.0, hosts)["slow"]["times"] == pytest.approx(2.5)


def test_no_rank_is_slow_if_it_costs_the_others_little_or_there_is_one():
    assert slow_rank([1.0, 1.7], 8.0, ["a", "b"]) == slow_rank([7.0], 8.0, ["a"]) == {}
    assert slow_rank([0.0, 0.0], 8.0, ["a", "b"]) == {}, "the kernel counts no time"


def test_a_line_names_the_slow_rank_by_its_time_without_waits_and_the_rank_with_slow_input():
    """This rank waits 2 s for each batch and computes for 6 s."""
    _, lines, _ = run(6, world=WithAnother)
    assert [line["slow"] for line in lines] == [{"rank": 0, "host": "host0", "times": 4.0}] * 3
    assert {line["loss"] for line in lines} == {SlowTrainer.loss}, "the mean of all ranks' rows"
    late = {"rank": 1, "host": "host1", "others": pytest.approx(4 / 12), "input": 0.5}
    assert [line["late"] for line in lines[1:]] == [late] * 2  # the first batch is told apart


def test_a_request_to_stop_is_answered_before_the_next_batch():
    """The third step ends at 25 s."""
    trainer, lines, done = run(100, log_every=4, stop_at=20)
    assert trainer.synced_batches.stopped
    assert (trainer.meta.step, trainer.meta.epoch) == (3, 0)
    assert [line["step"] for line in lines] == [3]
    assert done == [("saved", 3)]


def test_a_stop_while_a_batch_is_waited_for_leaves_that_batch_out():
    """It comes at 19 s, and only then is the trainer asked again."""
    trainer, _, done = run(100, stop_at=18)
    assert (trainer.meta.step, trainer.meta.rows, done) == (2, 2 * ROWS, [("saved", 2)])
    assert trainer.meta.loader == {"epoch": 0, "step": 2}, "the batch is the next one"


def test_a_stop_of_one_rank_stops_the_others_that_have_their_batch():
    class OtherIsAsked(Alone):
        ranks = 2

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values + torch.tensor([1, 0, 0])  # it has no batch, and no loss that failed

    synced = SyncedBatches(OtherIsAsked(), lambda: False)
    assert list(synced.batches(SlowFeed(Clock(), 3))) == []
    assert synced.stopped


def test_a_stop_during_an_evaluation_finds_its_model_saved():
    """Steps end at 9, 17 and 25 s; saving then takes 100 s, so the evaluation begins at 125 s."""
    trainer, _, done = run(6, evals=2, stop_at=100)
    assert trainer.synced_batches.stopped
    assert done == [("saved", 3), ("evaluated", 3)]


def test_a_stop_at_the_end_of_an_epoch_counts_the_epoch():
    trainer, _, _ = run(4, epochs=3, log_every=4, stop_at=30)
    assert trainer.synced_batches.stopped
    assert (trainer.meta.step, trainer.meta.epoch) == (4, 1)


def test_a_loss_that_is_no_number_ends_the_run_with_advice():
    """At once, not at the next line of the log."""
    with pytest.raises(
        NotANumber,
        match=r"nan at step 1\..* 1e\+06.* try a tenth of --lr 0\.05 and --dense-lr 0\.001",
    ):
        run(4, loss=float("nan"), log_every=100)


def test_a_loss_near_the_largest_number_is_one():
    """The sum over its rows would be none in float32."""
    trainer, lines, _ = run(4, loss=3e38)
    assert trainer.meta.step == 4
    assert [line["loss"] for line in lines] == pytest.approx([3e38] * 2)


def test_batches_that_are_left_out_are_counted_until_there_are_too_many_in_a_row():
    with raises(NotANumber, "11 batches", "step 11"):
        run(20, loss=float("nan"), on_nonfinite="skip")


def test_the_first_loss_that_is_no_number_is_named():
    guard = FiniteGuard(
        Config(data="fake", version=0), Alone(), BatchChecker(SIZES, DENSE, "fake"), print
    )
    for step, loss in ((3, math.inf), (4, math.nan)):
        guard.watch(step, SimpleNamespace(epoch=0, step=step), torch.tensor(loss))
    with raises(NotANumber, "the loss is inf at step 3"):
        guard.end()


def test_a_run_that_takes_up_a_version_keeps_its_bias_and_counts_evaluations_from_there(
    monkeypatch,
):
    monkeypatch.setattr(SlowTrainer, "_set_first_bias", None)
    *_, done = run(4, evals=2, begun={"step": 3, "since": 3})
    assert done == [("saved", 5), ("evaluated", 5), ("saved", 7), ("evaluated", 7)]


@pytest.mark.parametrize(
    ("step", "behind", "comes_first"),
    [(0, True, True), (3, True, True), (2, True, False), (0, False, False), (3, False, False)],
)
def test_an_evaluation_that_the_last_checkpoint_lacks_comes_first(step, behind, comes_first):
    """If it was saved at an evaluation: after the third of nine steps, or at an epoch's end."""
    begun = {"step": 9 + step, "epoch": 1, "loader": {"epoch": 1, "step": step}}
    *_, done = run(9, epochs=3, evals=3, begun=begun, behind=behind)
    assert (done[0] == ("evaluated", 9 + step)) is comes_first
    *_, ended = run(9, epochs=3, evals=3, begun=begun, behind=behind, good_at=9 + step)
    assert (ended == done[:1]) is comes_first
    *_, done = run(9, epochs=3, evals=3, begun=begun, reached=True)
    assert (done == []) is (step in (0, 3))


def test_evaluations_are_spread_over_an_epoch_each_after_a_checkpoint():
    _, _, done = run(9, epochs=2, evals=3)
    steps = [3, 6, 9, 12, 15, 18]
    assert done == [(what, step) for step in steps for what in ("saved", "evaluated")]


def test_training_ends_where_it_is_good_enough():
    trainer, _, done = run(9, epochs=5, evals=3, good_at=12)
    assert done[-1] == ("evaluated", 12)
    assert (trainer.meta.step, trainer.synced_batches.stopped) == (12, False)


def test_a_checkpoint_falls_on_every_nth_step_and_none_twice():
    _, _, done = run(8, save_every=4)
    assert done == [("saved", 4), ("saved", 8), ("evaluated", 8)]


def test_the_peak_is_what_was_seen():
    assert run(3)[0].figures.peak_bytes == 7
