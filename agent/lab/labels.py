"""Makes labelled looks for the value network, by forks of simulated runs: `label_shard`.

At a look, each candidate is put in force in a copy of the simulator. All copies have the same random events, and keep
their setting. The label of a candidate is the number of rows that it brings until the horizon. A killed run has lost
all rows. A shard holds the looks of a range of training pipelines. Shards that exist are not made again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.choice.choice import Chooser, LookChoice
from sluice.agent.choice.observation import Foreknowledge
from sluice.agent.choice.value import LookInputs, features
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.simulator.scenario import Scenario

HORIZON_S = 12.0
"""Seconds for which each candidate is simulated. Its last rate is assumed for `LATER_S` more."""
LATER_S = 24.0
_LAST_S = 4.0  # the seconds over which the last rate is measured
_EPISODE_S = 60.0
_LOOKS = 12  # labelled looks of an episode, at most
_CHANGES_AT = (20.0, 40.0)  # earlier than in the pipelines that judge, so that episodes are short
_MIXED = ("processes", "cliff", "crowding", "throttled store", "fair neighbour", "strict neighbour")
_PLAIN_SHARE = 0.4  # of the pipelines without any of these mechanisms, this share is used
_KNOWN = 0.7  # how often a run knows its store before its first row
_TRIED_SHARE = 0.15  # after a labelled look, any candidate goes on with this probability


class LabelledLook(NamedTuple):
    """A look with its labels."""

    given: LookInputs
    rows: ndarray
    """The rows of each candidate, as a share of the best one's. A killed run has lost as many as the best one has."""
    planned: int
    """The number of the planner's decision."""
    number: int
    """The number of the pipeline."""


def fork(simulator: Simulator) -> Simulator:
    """Returns a copy that goes on with the same random events."""
    copied = copy.copy(simulator)
    for name, value in vars(simulator).items():
        if isinstance(value, list | dict):
            setattr(copied, name, copy.copy(value))
    copied._random = copy.deepcopy(simulator._random)
    return copied


def scenario_of(number: int) -> Scenario | None:
    """Returns the training pipeline of this number. None: it is left out, as there are enough like it."""
    changing = number % 2 == 1
    scenario = pipeline("training", number, changing=changing)
    draw = np.random.default_rng((11, number))
    plain = not any(name in scenario.about for name in _MIXED)
    if plain and draw.random() >= _PLAIN_SHARE:
        return None
    changes = tuple(
        dataclasses.replace(change, at=at + 10 * draw.random(), over=min(change.over, 10.0))
        for change, at in zip(scenario.changes, _CHANGES_AT, strict=False)
    )
    return dataclasses.replace(scenario, seconds=_EPISODE_S, changes=changes)


def foreknowledge_of(scenario: Scenario, draw: np.random.Generator) -> Foreknowledge:
    """Returns what a run of this pipeline knows before the first row. A run may not know it."""
    store = "remote" if scenario.stages[0].cpu < 0.5 else "local"
    return Foreknowledge(store=store if draw.random() < _KNOWN else None)


def rows_of(simulator: Simulator, look: LookChoice) -> ndarray:
    """Returns the rows of each candidate until the horizon and later. Negative: the run was killed."""
    rows = []
    for candidate in look.candidates:
        copied = fork(simulator)
        knobs = copied.limits.clamp(candidate.knobs)
        if knobs != copied.knobs:
            copied.apply(knobs)
        before = copied.consumed
        copied.advance(HORIZON_S - _LAST_S)
        between = copied.consumed
        copied.advance(_LAST_S)
        last = copied.consumed - between
        rows.append(-1.0 if copied.killed else between - before + last * (1 + LATER_S / _LAST_S))
    return np.array(rows)


def episode(number: int, policy: Chooser, *, values: bool = False) -> Iterator[LabelledLook]:
    """Runs a training pipeline and yields its labelled looks. With `values`, the policy's network decides."""
    scenario = scenario_of(number)
    if scenario is None:
        return
    draw = np.random.default_rng((12, number))
    policy = policy.knowing(foreknowledge_of(scenario, draw))
    simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs, seed=number)
    state = policy.initial(scenario.limits, simulator.knobs)
    times = _look_times(scenario, draw)
    first = True
    while simulator.now < scenario.seconds and not simulator.killed and times:
        look = policy.look(simulator.snapshot(), state)
        chosen = look.planned_choice
        if values and look.seen is not None and len(look.candidates) > 1:
            chosen = policy.best(look)[0]
        if len(look.candidates) > 1 and (first or simulator.now >= times[0]):
            assert look.seen is not None
            times = [at for at in times if at > simulator.now]
            rows = rows_of(simulator, look)
            best = rows.max()
            if best > 0:
                shares = np.where(rows < 0, -1.0, rows / best).astype(np.float32)
                given = features(look.seen, look.candidates)
                planned = look.planned_choice or 0
                yield LabelledLook(given, shares, planned, number)
            other = draw.random()
            if other < _TRIED_SHARE:
                chosen = int(draw.integers(len(look.candidates)))
            elif not values and other < 0.6:
                chosen = int(rows.argmax())
            first = False
        knobs, state, _ = policy.carry_out(look, chosen)
        knobs = simulator.limits.clamp(knobs)
        if knobs != simulator.knobs:
            simulator.apply(knobs)
        simulator.advance(policy.next_look_s(state) or 1.0)


def _look_times(scenario: Scenario, draw: np.random.Generator) -> list[float]:
    """Returns the times from which on the next look is labelled: many soon after the start and after each change."""
    starts = [0.0, *(change.at for change in scenario.changes)]
    each = _LOOKS // len(starts)
    times = [
        start + float(np.exp(draw.uniform(np.log(0.5), np.log(20.0))))
        for start in starts
        for _ in range(each)
    ]
    return sorted(at for at in times if at < scenario.seconds)


def label_shard(
    path: Path, numbers: Sequence[int], policy: Chooser, *, values: bool = False
) -> int:
    """Writes the looks of these pipelines, unless there are none or the file exists. Returns their number."""
    if path.exists():
        with np.load(path, allow_pickle=False) as stored:
            return len(stored["number"])
    looks = [look for number in numbers for look in episode(number, policy, values=values)]
    if not looks:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(
            file,
            stages=np.concatenate([look.given.stages for look in looks]),
            pipeline=np.stack([look.given.pipeline for look in looks]),
            changes=np.concatenate(
                [look.given.changes.reshape(-1, look.given.changes.shape[2]) for look in looks]
            ),
            candidates=np.concatenate([look.given.candidates for look in looks]),
            rows=np.concatenate([look.rows for look in looks]),
            stage_count=np.array([len(look.given.stages) for look in looks]),
            candidate_count=np.array([len(look.rows) for look in looks]),
            planned=np.array([look.planned for look in looks]),
            number=np.array([look.number for look in looks]),
        )
    part.rename(path)
    return len(looks)


def read_looks(paths: Sequence[Path]) -> list[LabelledLook]:
    """Returns the looks of these shards."""
    looks = []
    for path in paths:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored}
        stage = candidate = change = 0
        for i, (stages, candidates) in enumerate(
            zip(arrays["stage_count"], arrays["candidate_count"], strict=True)
        ):
            after = change + stages * candidates
            given = LookInputs(
                arrays["stages"][stage : stage + stages],
                arrays["pipeline"][i],
                arrays["changes"][change:after].reshape(candidates, stages, -1),
                arrays["candidates"][candidate : candidate + candidates],
            )
            rows = arrays["rows"][candidate : candidate + candidates]
            planned, number = int(arrays["planned"][i]), int(arrays["number"][i])
            looks.append(LabelledLook(given, rows, planned, number))
            stage, candidate, change = stage + stages, candidate + candidates, after
    return looks
