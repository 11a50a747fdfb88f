"""`bayes`: Bayesian optimisation of the measured throughput by Optuna's Gaussian-process sampler, over all workers.

Twenty settings are tried and measured, then the best is kept. The sampler sees the settings on a logarithmic scale and
is made anew from the history each time, so that deciding stays pure; its seed is the number of the trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_TRIALS, _STARTUP = 20, 6
_SETTLE, _WINDOW = 1, 2


def propose(limits: Limits, most: int, history: tuple[tuple[Knobs, float], ...]) -> dict[str, int]:
    """The next setting to try, after those in `history`."""
    import optuna
    import torch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {
        name: optuna.distributions.IntDistribution(low, max(low, min(high, most)), log=True)
        for name, (low, high) in limits.workers.items()
    }
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.GPSampler(
            seed=len(history), n_startup_trials=_STARTUP, deterministic_objective=False
        ),
    )
    for knobs, rate in history:
        study.add_trial(
            optuna.trial.create_trial(
                params={n: min(max(knobs.workers[n], s.low), s.high) for n, s in spaces.items()},
                distributions=dict(spaces),
                value=rate,
            )
        )
    with (
        torch._C.DisableTorchFunction()
    ):  # optuna's device context has Python look at each operation: a third dearer
        return {name: int(count) for name, count in study.ask(dict(spaces)).params.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BayesState:
    limits: Limits
    knobs: Knobs
    most: int = 0
    history: tuple[tuple[Knobs, float], ...] = ()
    watch: Stopwatch = field(default_factory=Stopwatch)


class Bayes(Policy):
    name = "bayes"

    def initial(self, limits: Limits, knobs: Knobs) -> BayesState:
        return BayesState(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: BayesState) -> tuple[Knobs, BayesState, Reason]:
        if not state.most:
            return (
                state.knobs,
                replace(
                    state, most=2 * max(1, round(snapshot.cpu_quota)), watch=Stopwatch(0, snapshot)
                ),
                Reason(text="measuring the start"),
            )
        if len(state.history) >= _TRIALS:
            return state.knobs, state, Reason(text="the best of all that was tried")
        watch, seen = state.watch.look(snapshot, settle=_SETTLE, window=_WINDOW)
        if seen is None:
            return state.knobs, replace(state, watch=watch), Reason(text="measuring a setting")
        history = (*state.history, (state.knobs, seen.rows_per_s))
        if len(history) >= _TRIALS:
            knobs, rate = max(history, key=lambda tried: tried[1])
            return (
                knobs,
                replace(state, knobs=knobs, history=history),
                Reason(text="the best of all that was tried", predicted_rows_per_s=rate),
            )
        knobs = state.limits.resized(state.knobs, propose(state.limits, state.most, history))
        return (
            knobs,
            replace(state, knobs=knobs, history=history, watch=Stopwatch()),
            Reason(text=f"trial {len(history)} of {_TRIALS}"),
        )
