"""A search for settings that reach an AUC: which trial comes next, when one is given up, and what came of all.

Trials are proposed by Optuna (a tree of Parzen estimators, or at random), each seeded by its own number, so that a
search that was broken off goes on as if it had not been. A trial that lies clearly below the best third of those that
came as far is given up at that evaluation (successive halving).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from agent.charts import SCORE, Series, chart
from dlrm.config import ConfigError
from dlrm.space import Space

REDUCTION = 3
CLOSE = 0.01  # of AUC below the best third: an early evaluation does not tell such trials apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a trial came to."""

    auc: float | None
    """The best on the validation split; None if there was none."""
    seconds: float
    error: str = ""


class Runner(Protocol):
    """Runs one trial. `given_up(auc)` is asked at each evaluation, and ends the trial if it says so."""

    def __call__(self, number: int, settings: dict[str, Any], given_up: Callable[[float], bool]) -> Ended: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One trial, as the study keeps it."""

    number: int
    settings: dict[str, Any]
    auc: float | None
    seconds: float
    state: str
    """`complete`, `pruned` (given up) or `fail`."""


class Halving(optuna.pruners.BasePruner):
    """At evaluations 1, 3, 9, … a trial is held against all that came as far, once there are a few."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        step = trial.last_step
        if step is None or step not in (REDUCTION**k for k in range(step)):
            return False
        reached = sorted((t.intermediate_values[step] for t in study.get_trials(deepcopy=False)
                          if step in t.intermediate_values), reverse=True)
        if len(reached) <= REDUCTION:
            return False
        return trial.intermediate_values[step] < reached[len(reached) // REDUCTION - 1] - CLOSE


class Search:
    """One study in a folder. Reads what is there; `step` makes one trial."""

    def __init__(self, folder: Path, space: Space, *, seed: int, plain: bool = False) -> None:
        """`plain`: at random, and none is given up."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        pruner = optuna.pruners.NopPruner() if plain else Halving()
        storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
        self._study = optuna.create_study(storage=storage, study_name="search", direction="maximize", pruner=pruner,
                                          load_if_exists=True)
        asked = {"seed": seed, "plain": plain, "space": dict(space.choices)}
        before = self._study.user_attrs
        for name, value in asked.items():
            if name in before and before[name] != value:
                raise ConfigError(f"search: {folder} was begun with another {name}; choose another folder")
            self._study.set_user_attr(name, value)
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)  # it was broken off
        self._space, self._seed, self._plain = space, seed, plain

    @property
    def found(self) -> list[Found]:
        """Trials that ended, in order."""
        return [Found(number=t.number, settings=t.params, auc=t.user_attrs.get("auc"),
                      seconds=t.user_attrs.get("seconds", 0.0), state=t.state.name.lower())
                for t in self._study.get_trials(deepcopy=False) if t.state.is_finished()]

    @property
    def seconds(self) -> float:
        """Of all trials so far."""
        return sum(one.seconds for one in self.found)

    def step(self, run: Runner) -> Found:
        """One more trial."""
        number = len(self._study.get_trials(deepcopy=False))
        seed = self._seed * 100_003 + number
        self._study.sampler = optuna.samplers.RandomSampler(seed=seed) if self._plain else optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=5)
        trial = self._study.ask()
        settings, told = self._space.ask(trial), [False]  # at each evaluation, whether the trial is given up

        def given_up(auc: float) -> bool:
            trial.report(auc, len(told))
            told.append(trial.should_prune())
            return told[-1]

        ended = run(trial.number, settings, given_up)
        trial.set_user_attr("seconds", round(ended.seconds, 3))
        if ended.auc is not None:
            trial.set_user_attr("auc", ended.auc)
        state = TrialState.FAIL if ended.error or ended.auc is None else TrialState.COMPLETE
        if state is TrialState.COMPLETE and told[-1]:
            state = TrialState.PRUNED
        self._study.tell(trial, ended.auc if state is TrialState.COMPLETE else None, state=state)
        return next(one for one in self.found if one.number == trial.number)


def front(found: Sequence[Found]) -> list[Found]:
    """The trials that no other beats in both AUC and seconds, the fastest first."""
    best: list[Found] = []
    for one in sorted((f for f in found if f.auc is not None), key=lambda f: (f.seconds, -(f.auc or 0))):
        if not best or (one.auc or 0) > (best[-1].auc or 0):
            best.append(one)
    return best


def picture(found: Sequence[Found]) -> str:
    """AUC against seconds as a figure: each trial, and the best for its time."""

    def points(some: Sequence[Found]) -> list[tuple[float, float]]:
        return sorted((f.seconds, f.auc) for f in some if f.auc is not None)

    end = max((f.seconds for f in found), default=1.0)
    return chart("AUC against seconds of a trial", [
        Series(name="best for its time", points=points(front(found)), style="step"),
        Series(name="seen to its end", points=points([f for f in found if f.state == "complete"]), style="dots"),
        Series(name="given up", points=points([f for f in found if f.state == "pruned"]), style="dots")],
        [], end=end, axis=SCORE)
