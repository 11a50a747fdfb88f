"""A search for settings that reach an AUC: which trial comes next, how far it goes, and what came of all.

Trials are proposed by Optuna (a Gaussian process, or at random), each seeded by its own number, so that a
search that was broken off goes on as if it had not been. A trial goes one leg at a time (successive halving): at the
first evaluation and at the third it is set aside, and it goes on from there once it lies among the best of those that
came as far. So a poor one costs a ninth, and none is judged before there are others to hold it against.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.trial import TrialState, create_trial

from sluice.agent.report import page as report
from sluice.agent.report.charts import SCORE, Panel, Series, chart
from sluice.agent.report.run_folder import read_lines
from sluice.agent.report.tables import table
from sluice.dlrm.hpo.space import Space, words
from sluice.dlrm.options import ConfigError

LEGS = {1: 3, 3: 2}
"""Evaluations after which a trial is set aside → of so many that came as far, one goes on."""
_FIRST = 5  # trials at random, before there is anything to learn from


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The result of a leg of a trial."""

    aucs: tuple[float, ...]
    """The AUCs on the validation split, since the trial's beginning."""
    seconds: float
    processor_s: float = 0.0
    stopped: bool = False
    """Whether the trial stopped before its end, so that it can go on."""
    error: str = ""


class TrialRunner(Protocol):
    """Trains on from where the trial was, until it has had `until` evaluations in all, or (None) to its end."""

    def __call__(self, number: int, settings: dict[str, Any], until: int | None) -> Ended: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One trial, as it is known after its last leg."""

    number: int
    settings: dict[str, Any]
    aucs: tuple[float, ...] = ()
    seconds: float = 0.0
    processor_s: float = 0.0
    legs: int = 0
    state: str = "new"
    """`new` at first; then `complete`, `aside` (it may go on later) or `fail`."""

    @property
    def auc(self) -> float | None:
        """The best AUC on the validation split; None if there was none."""
        return max(self.aucs, default=None)

    @property
    def at(self) -> int | None:
        """The evaluation in LEGS at which the trial was set aside; None if it does not go on. It may have had one
        more."""
        return max((n for n in LEGS if n <= len(self.aucs)), default=None) if self.state == "aside" else None


class Search:
    """One search, kept in a folder. It goes on from what is there; `step` runs one leg of a trial."""

    def __init__(self, folder: Path, space: Space, *, seed: int, plain: bool = False) -> None:
        """`plain`: trials are drawn at random, and each goes to its end."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "trials.jsonl"
        self._space, self._seed, self._plain = space, seed, plain
        asked = {"seed": seed, "plain": plain, "space": dict(space.choices)}
        lines = read_lines(self._file)
        for name, value in asked.items():
            if lines and lines[0].get(name) != value:
                raise ConfigError(f"search: {folder} was begun with another {name}; choose another folder")
        self.legs = [Found(**{**line, "aucs": tuple(line["aucs"])}) for line in lines[1:]]
        """All legs in order: for each, what was known of its trial afterwards."""
        # Written anew: a crash may have torn the last line.
        self._file.write_text("".join(json.dumps(line) + "\n" for line in lines or [asked]))

    @property
    def found(self) -> list[Found]:
        """All trials, in order."""
        return latest(self.legs)

    @property
    def seconds(self) -> float:
        """The seconds that all trials took so far."""
        return sum(one.seconds for one in self.found)

    def step(self, run: TrialRunner, *, more: bool = True) -> Found | None:
        """Runs one more leg: of the trial that is to go on, or else, if there may be `more` trials, of a new one."""
        found = self.found
        one = going_on(found, more=more)
        if one is None and not more:
            return None
        if one is None:
            one = Found(number=len(found), settings=self._proposed(found))
        until = None if self._plain else next((n for n in LEGS if n > (one.at or 0)), None)
        ended = run(one.number, one.settings, until)
        state = "fail" if ended.error or not ended.aucs else "aside" if ended.stopped else "complete"
        one = Found(number=one.number, settings=one.settings, aucs=ended.aucs, state=state, legs=one.legs + 1,
                    seconds=round(one.seconds + ended.seconds, 3),
                    processor_s=round(one.processor_s + ended.processor_s, 3))
        self.legs.append(one)
        with open(self._file, "a") as file:
            file.write(json.dumps(asdict(one)) + "\n")
        return one

    def _proposed(self, found: Sequence[Found]) -> dict[str, Any]:
        """The settings of the next trial. They are the same whenever the trials before it are."""
        seed = self._seed * 100_003 + len(found)
        sampler = optuna.samplers.RandomSampler(seed=seed) if self._plain else optuna.samplers.GPSampler(
            seed=seed, n_startup_trials=_FIRST)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        distributions = self._space.distributions()
        study.add_trials([create_trial(params=one.settings, distributions=distributions, value=auc,
                                       state=TrialState.COMPLETE)
                          for one, auc in zip(found, expected(found), strict=True)])
        return study.ask(distributions).params


def latest(legs: Sequence[Found]) -> list[Found]:
    """What is known of each trial after its last leg."""
    return list({one.number: one for one in legs}.values())


def going_on(trials: Sequence[Found], *, more: bool = True) -> Found | None:
    """The trial that is to go on, the furthest first. If there will be no `more`, the one from which most is expected,
    until that is one that was seen to its end."""
    ends = expected(trials)
    if not more:
        best = max(zip(ends, trials, strict=True), key=lambda pair: pair[0], default=(0.0, None))[1]
        return best if best is not None and best.at is not None else None
    for evaluation, among in sorted(LEGS.items(), reverse=True):
        came = sorted((one for one in trials if len(one.aucs) >= evaluation), key=lambda one: -one.aucs[evaluation - 1])
        for one in came[:len(came) // among]:
            if one.at == evaluation:
                return one
    return None


def expected(trials: Sequence[Found]) -> list[float]:
    """The AUC that each trial would have at its end: what it had when it was set aside, plus what others gained from
    there on, on average. A failed one has the least of all."""
    def at(one: Found, evaluation: float) -> float:
        return max(one.aucs) if evaluation == math.inf else one.aucs[int(evaluation) - 1]

    def passed(one: Found, evaluation: float) -> bool:
        return one.state == "complete" if evaluation == math.inf else len(one.aucs) >= evaluation

    ends: dict[float, float] = {math.inf: 0.0}
    after: float = math.inf
    for evaluation in sorted(LEGS, reverse=True):
        both = [one for one in trials if passed(one, after) and passed(one, evaluation)]
        gains = [at(one, after) - at(one, evaluation) for one in both]
        ends[evaluation] = ends[after] + (sum(gains) / len(gains) if gains else 0.0)
        after = evaluation
    known = {one.number: at(one, one.at or math.inf) + ends[one.at or math.inf]
             for one in trials if one.aucs and one.state != "fail"}
    return [known.get(one.number, min(known.values(), default=0.0)) for one in trials]


def front(trials: Sequence[Found]) -> list[Found]:
    """The trials that no other beats in both AUC and seconds, the fastest first."""
    best: list[Found] = []
    for one in sorted((f for f in trials if f.auc is not None), key=lambda f: (f.seconds, -(f.auc or 0))):
        if not best or (one.auc or 0) > (best[-1].auc or 0):
            best.append(one)
    return best


def picture(trials: Sequence[Found]) -> str:
    """AUC against seconds as a figure: each trial, and the best for its time."""

    def points(some: Sequence[Found]) -> list[tuple[float, float]]:
        return sorted((f.seconds, f.auc) for f in some if f.auc is not None)

    end = max((f.seconds for f in trials), default=1.0)
    return chart("AUC against seconds of a trial", Panel(axis=SCORE, series=[
        Series(name="best for its time", points=points(front(trials)), style="step"),
        Series(name="seen to its end", points=points([f for f in trials if f.state == "complete"]), style="dots"),
        Series(name="set aside", points=points([f for f in trials if f.state == "aside"]), style="dots")]), end=end)


def write_page(folder: Path, trials: Any) -> Path:
    """Writes the page and says where it is."""
    best = front(trials)
    rows = [[str(one.number), f"{one.auc:.5f}", f"{one.seconds:.1f} s", escape(" ".join(words(one.settings)))]
            for one in best]
    aside = sum(one.state == "aside" for one in trials)
    page = folder / "search.html"
    page.write_text(report.filled(
        title="Search", name=folder.resolve().name,
        headline=f"{len(trials)} trials, AUC up to {best[-1].auc:.5f}" if best else f"{len(trials)} trials",
        rest=f"{aside} were set aside early.", charts=picture(trials),
        decisions=f"<section>{table(('trial', 'AUC', 'time', 'settings'), rows)}</section>",
        footer=f"{sum(one.seconds for one in trials):.0f} seconds of trials."), encoding="utf-8")
    return page
