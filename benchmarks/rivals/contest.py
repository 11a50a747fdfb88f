"""`python -m sluice.benchmarks.rivals.contest` compares policies on live pipelines with fixed settings.

The settings of a set-up are surveyed once each, and each policy tunes a pipeline of its own from one worker a stage, as
often as there are `starts`, in turns: these show how soon it reaches the best setting's rate.
Then arms take turns on one pipeline, each round in another order: as many workers as `cores`, the `best` setting
of the survey, the same once more (the noise floor), the leanest that keeps the trainer fed where one does, and what
each policy settled on. The score is (policy − cores) / (best − cores), of the means over the rounds, with a 95 %
interval from drawing rounds anew. A set-up counts only if the best setting, measured again, is 1.5 times `cores`.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from sluice.agent.controller import Controller
from sluice.agent.policies import make
from sluice.agent.tunable import Policy, Tunable
from sluice.benchmarks.live_setups import SETUPS, TABLE, LiveError, Session, Turn
from sluice.benchmarks.small_table import small_table
from sluice.common.lines import say
from sluice.common.program import run as program
from sluice.common.settings import parse, setting
from sluice.ingest.knobs import Knobs, nearest
from sluice.ingest.stats import Snapshot

COUNTS = 1.5  # times `cores`: a smaller spread says little
START_S, BACK = (
    10.0,
    0.95,
)  # of a start: how long it is, and the share of the best rate that ends it
FED = 0.01  # share of the trainer's time spent waiting: up to this, the trainer is the bottleneck
_DRAWS = 4000
_FIXED = ("cores", "best", "best again", "lean")


class Bench(Protocol):
    """A live pipeline and its consumer; `sluice.benchmarks.live_setups.Session` is one."""

    @property
    def tunable(self) -> Tunable: ...

    def setting(self, text: str) -> Knobs: ...

    def run(self, seconds: float) -> tuple[Snapshot, Snapshot]: ...

    def measure(self, knobs: Knobs, seconds: float) -> tuple[Snapshot, Snapshot]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Settled:
    """The setting at which a policy arrived, and how."""

    knobs: Knobs
    changes: tuple[float, ...]
    """The moments of its changes, in seconds from the start."""
    cost: float
    """The share of a core that looking and deciding took."""
    frozen: str | None
    rows: tuple[tuple[float, int], ...] = ()
    """The moment of each look, and the rows that had come by then."""

    def share(self, best: float) -> float:
        """The rows that came in the first ten seconds, as a share of those at the rate `best`."""
        at, rows = max((look for look in self.rows if look[0] <= START_S), default=(1.0, 0))
        return rows / (at * best)

    def reached_s(self, best: float) -> float:
        """The seconds after which the rows of two looks together first came at 0.95 of the rate `best`; infinite if
        they never did."""
        return next(
            (
                at
                for (at, rows), _, (end, more) in zip(
                    self.rows, self.rows[1:], self.rows[2:], strict=False
                )
                if more - rows >= BACK * best * (end - at)
            ),
            math.inf,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """The share of the gain that the best setting brings over `cores`, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Contest:
    """One set-up: how each setting did in the survey, how each arm did in its turns, where the policies arrived."""

    survey: Mapping[str, Turn]
    arms: Mapping[str, Sequence[Turn]]
    settled: Mapping[str, Settled]
    starts: Mapping[str, Sequence[Settled]] = field(default_factory=dict)
    """Each time that a policy began anew; what it settled on last takes the turns."""

    @property
    def best(self) -> str:
        return max(self.survey, key=lambda name: self.survey[name].rows_per_s)

    @property
    def spread(self) -> float:
        """The rate of the best setting, measured again, over that of `cores`."""
        return self._mean("best", "rows_per_s") / self._mean("cores", "rows_per_s")

    def score(self, arm: str) -> Score:
        return score(*([t.rows_per_s for t in self.arms[name]] for name in (arm, "cores", "best")))

    def start(self, policy: str) -> dict[str, Any]:
        """How a policy's starts did beside the best setting: the share of its rows in the first ten seconds, with its
        95 % interval from drawing starts anew, and the median of the seconds to 0.95 of its rate."""
        best, starts = self._mean("best", "rows_per_s"), self.starts.get(policy, ())
        if not starts:
            return {}
        shares = np.array([start.share(best) for start in starts])
        low, high = np.percentile(
            np.random.default_rng(0).choice(shares, (_DRAWS, len(shares))).mean(axis=1), [2.5, 97.5]
        )
        reached = statistics.median(start.reached_s(best) for start in starts)
        return {
            "starts": len(starts),
            "share_10s": round(float(shares.mean()), 3),
            "low": round(float(low), 3),
            "high": round(float(high), 3),
            "to_95_s": round(reached, 2) if math.isfinite(reached) else None,
        }

    def cpu_ratio(self, arm: str) -> float | None:
        """The cores that an arm used over those of the leanest setting that keeps the trainer fed, if there is one."""
        return self._mean(arm, "cpu") / self._mean("lean", "cpu") if "lean" in self.arms else None

    def _mean(self, arm: str, what: str) -> float:
        return statistics.fmean(getattr(turn, what) for turn in self.arms[arm])

    def to_dict(self) -> dict[str, Any]:
        """The figures that the program's last line reports."""
        policies = {}
        for name, settled in self.settled.items():
            own = self.score(name)
            ratio = self.cpu_ratio(name)
            policies[name] = {
                "score": round(own.value, 3),
                "low": round(own.low, 3),
                "high": round(own.high, 3),
                "of_best": round(
                    self._mean(name, "rows_per_s") / self._mean("best", "rows_per_s"), 3
                ),
                "decisions": len(settled.changes),
                "last_change_s": round(max(settled.changes, default=0.0), 1),
                "cost": round(settled.cost, 5),
                "stall": round(self._mean(name, "stall"), 4),
                "cpu_ratio": None if ratio is None else round(ratio, 2),
                "knobs": settled.knobs.to_dict(),
                "frozen": settled.frozen,
                "start": self.start(name),
            }
        again = self.score("best again")
        return {
            "counts": self.spread >= COUNTS,
            "best": self.best,
            "best_over_cores": round(self.spread, 2),
            "rows_per_s": {name: round(self._mean(name, "rows_per_s")) for name in self.arms},
            "noise": [round(again.low, 3), round(again.high, 3)],
            "policies": policies,
        }


def score(arm: Sequence[float], cores: Sequence[float], best: Sequence[float]) -> Score:
    """(arm − cores) / (best − cores) of the means over the rounds, with its 95 % interval; nan if there is no gain."""
    if not len(arm) == len(cores) == len(best) > 0:
        raise ValueError(
            f"{len(arm)}, {len(cores)} and {len(best)} rounds: give as many of each, and at least one"
        )
    drawn = np.random.default_rng(0).integers(0, len(arm), size=(_DRAWS, len(arm)))
    means = [np.asarray(values)[drawn].mean(axis=1) for values in (arm, cores, best)]
    gain = statistics.fmean(best) - statistics.fmean(cores)
    if gain <= 0:
        return Score(math.nan, math.nan, math.nan)
    some = means[2] > means[1]  # draws in which the best setting is no better say nothing
    shares = (means[0][some] - means[1][some]) / (means[2][some] - means[1][some])
    low, high = np.percentile(shares, [2.5, 97.5])
    return Score((statistics.fmean(arm) - statistics.fmean(cores)) / gain, float(low), float(high))


def settle(
    bench: Bench, policy: Policy, seconds: float, clock: Callable[[], float] = time.monotonic
) -> Settled:
    """Lets a policy tune a pipeline for so many seconds."""
    changes: list[float] = []
    looks: list[tuple[float, int]] = []
    began = clock()

    def record(event: dict[str, Any]) -> None:
        if event["kind"] == "decision":
            changes.append(clock() - began)

    def observe(metric: dict[str, Any]) -> None:
        looks.append((clock() - began, metric["rows"]))

    with Controller(bench.tunable, policy, record=record, observe=observe) as controller:
        bench.run(seconds)
    knobs, backends = bench.tunable.knobs, bench.tunable.limits.backends
    # Settings that knobs do not name stay as another arm left them.
    knobs = replace(
        knobs, backend={n: knobs.backend.get(n, some[0]) for n, some in backends.items()}
    )
    return Settled(
        knobs,
        tuple(changes),
        controller.cost_s / max(1e-9, clock() - began),
        controller.frozen,
        tuple(looks),
    )


def contest(
    open_bench: Callable[[], Bench],
    settings: Sequence[str],
    policies: Mapping[str, Policy],
    *,
    rounds: int,
    seconds: float,
    settle_s: float,
    starts: int = 1,
) -> Contest:
    """Runs one set-up from the first start to the last round."""
    begun: dict[str, list[Settled]] = {name: [] for name in policies}
    for name in begun:
        if name in _FIXED:
            raise LiveError(f"{name!r} is measured anyway; name another policy")
    order = np.random.default_rng(1)
    for name in (
        name for _ in range(starts) for name in order.permutation(list(policies)).tolist()
    ):
        with open_bench() as bench:
            begun[name].append(settle(bench, policies[name], settle_s))
    settled = {name: attempts[-1] for name, attempts in begun.items()}
    with open_bench() as bench:

        def turn(knobs: Knobs) -> Turn:
            return Turn.of(*bench.measure(knobs, seconds), knobs)

        survey = {text: turn(bench.setting(text)) for text in settings}
        best = max(survey, key=lambda text: survey[text].rows_per_s)
        fed = [text for text in settings if survey[text].stall <= FED]
        lean = min(fed, key=lambda text: survey[text].cpu, default=None)
        arms = {
            "cores": _cores(bench),
            "best": bench.setting(best),
            "best again": bench.setting(best),
            **({"lean": bench.setting(lean)} if lean is not None else {}),
            **{name: attempt.knobs for name, attempt in settled.items()},
        }
        turns: dict[str, list[Turn]] = {name: [] for name in arms}
        order = np.random.default_rng(
            0
        )  # an arm shows traces of the one before, so that must not always be the same
        for _ in range(rounds):
            for name in order.permutation(list(arms)).tolist():
                turns[name].append(turn(arms[name]))
    return Contest(survey, turns, settled, begun)


@dataclass(frozen=True, kw_only=True)
class ContestOptions:
    """The options of `python -m sluice.benchmarks.rivals.contest`."""

    title = "what"
    policy: tuple[str, ...] = setting(
        ("auto", "intune", "autotune", "plumber"), "these policies", again=True
    )
    setup: tuple[str, ...] = setting(
        (),
        "of the live set-ups (benchmarks/live_setups.py) these alone",
        metavar="NAME",
        again=True,
    )
    rounds: int = setting(10, "turns of each live arm", least=1)
    starts: int = setting(1, "times that each policy begins anew, in turns", least=1)
    settle: float = setting(
        10.0, "seconds in which a policy tunes a live pipeline", metavar="S", above=0
    )
    seconds: float = setting(0.4, "least seconds of each live turn", metavar="S", above=0)


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    """Returns the object for the last line of output."""
    options = parse(
        ContestOptions,
        argv,
        "python -m sluice.benchmarks.rivals.contest",
        description=__doc__ or "",
    )
    return {"live": {name: contest.to_dict() for name, contest in hold(options).items()}}


def hold(options: ContestOptions) -> dict[str, Contest]:
    """Runs the contest on these live set-ups (none named: on all), and tells each as soon as it is over."""
    known = [setup.name for setup in SETUPS]
    for name in options.setup:
        if name not in known:
            raise LiveError(
                f"there is no live set-up {name!r}{nearest(name, known)}; choose of {', '.join(known)}"
            )
    contests = {}
    with tempfile.TemporaryDirectory() as folder:
        clicks = small_table(Path(folder) / "clicks", **TABLE)
        for setup in (s for s in SETUPS if not options.setup or s.name in options.setup):
            say(f"live: {setup.name}: {setup.about}")
            contests[setup.name] = result = contest(
                lambda setup=setup: Session(setup, clicks),  # type: ignore[misc]
                setup.settings,
                {name: make(name) for name in options.policy},
                rounds=options.rounds,
                seconds=options.seconds,
                settle_s=options.settle,
                starts=options.starts,
            )
            for name, settled in result.settled.items():
                say(
                    f"{name} settled on {settled.knobs}"
                    + (f", stopped: {settled.frozen}" if settled.frozen else "")
                )
            say(table({setup.name: result}))
    return contests


def _cores(bench: Bench) -> Knobs:
    """The knobs with as many workers as cores in every stage."""
    alone, count = bench.setting(""), max(1, int(bench.tunable.snapshot().cpu_quota))
    return bench.tunable.limits.clamp(alone.with_workers(**dict.fromkeys(alone.workers, count)))


def table(contests: Mapping[str, Contest]) -> str:
    """The results as a person reads them: one line for each policy and set-up."""
    head = (
        f"{'live set-up':18}{'best setting':34}{'÷ cores':>8}  {'policy':10}{'score (95 %)':>22}{'same twice':>15}"
        f"{'changes':>9}{'last':>8}{'CPU ÷ lean':>12}{'first 10 s':>24}{'95 % after':>12}"
    )
    lines = [head]
    for name, result in contests.items():
        again = result.score("best again")
        for policy, settled in result.settled.items():
            ratio = result.cpu_ratio(policy)
            lines.append(
                f"{name:18}{result.best:34}{result.spread:>8.2f}  {policy:10}"
                f"{str(result.score(policy)) if result.spread >= COUNTS else 'does not count':>22}"
                f"{f'{again.low:.2f} to {again.high:.2f}':>15}{len(settled.changes):>9}"
                f"{max(settled.changes, default=0.0):>6.1f} s{'' if ratio is None else f'{ratio:.2f}':>12}"
                f"{_told(result.start(policy))}"
            )
    return "\n".join(lines)


def _told(start: Mapping[str, Any]) -> str:
    if not start:
        return ""
    share = "{share_10s:.2f} ({low:.2f} to {high:.2f})".format(**start)
    return f"{share:>24}" + (
        f"{'never':>12}" if start["to_95_s"] is None else f"{start['to_95_s']:>10.1f} s"
    )


if __name__ == "__main__":
    program(main)
