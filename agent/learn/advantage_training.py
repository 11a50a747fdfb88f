"""How `auto` learns what its candidates are worth: `collect` tries them out in pairs, `fit` makes the networks.

At some moments of a random pipeline's life each candidate is tried from the same state with the same random numbers,
and the planner goes on from there: the target is what it brought compared with the planner's own choice. The moments
are those that the last round's policy gets into. It leaves the planner's choice as `auto` does: rarely, and with the
caution of kinds that were never tried on a machine (`sluice.agent.policies.learned.residual`). Which bound is cautious
enough is settled by predictions for pipelines that the networks were not trained on; in the end whole pipelines must
gain.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from sluice.agent.learn.adam import Adam
from sluice.agent.learn.gym_env import STAGES, Tuning
from sluice.agent.policies.auto import Auto
from sluice.agent.policies.learned.advantage import FORMAT, MEMBERS, NEVER, SHAPES, STAGE_UNITS, Advantage
from sluice.agent.policies.learned.candidates import KINDS, Candidate
from sluice.agent.policies.learned.residual import TRIAL_S, Residual
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.simulator.random_pipelines import training
from sluice.agent.simulator.rollout import run

HORIZON = 20  # intervals that a try lasts, a second each: `TRIAL_S`
_UNTRIED = Residual().correction
PRICE_OF_CORES = 0.01  # of the rows, for all cores busy
_EARLY, _AFTER = 14, 20  # intervals after the start, and after a change, at which most is decided
_OFTEN, _SELDOM = 0.45, 0.05  # chance that a moment is tried out then, and at other times
_CLIP = 0.5  # a larger advantage counts as this: a clear one need not be exact
_FOLDS = 4  # each part of the pipelines is predicted from the others, to settle the bound
_STEPS, _BATCH, _RATE = 1200, 256, 3e-3
_SPREADS, _MARGINS = (0.5, 1.0, 2.0, 3.0), (0.0, 0.005, 0.01, 0.02, 0.04, 0.08)
_PROOF = 32  # whole pipelines, not trained on, that must gain by the result
_CHUNK = 4  # pipelines whose tries lie in one file


@dataclass(frozen=True, slots=True)
class Samples:
    """One row for each candidate that was tried; rows of the same moment have the same number in `moment`."""

    stages: np.ndarray
    count: np.ndarray
    whole: np.ndarray
    gain: np.ndarray
    moment: np.ndarray
    pipeline: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Samples:
        """Joins several sets. Moments are numbered anew, so that different ones stay apart."""
        firsts = np.cumsum([0, *(int(p.moment.max(initial=-1)) + 1 for p in parts[:-1])])
        columns = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)}
        columns["moment"] = np.concatenate([p.moment + first for p, first in zip(parts, firsts, strict=True)])
        return cls(**columns)

    @classmethod
    def of(cls, rows: Sequence[tuple[Candidate, float, int, int]]) -> Samples:
        stages = np.zeros((len(rows), STAGES, SHAPES["stage_weight"][1]), np.float32)
        for i, (one, *_) in enumerate(rows):
            stages[i, :len(one.stages)] = one.stages
        whole = np.zeros((len(rows), SHAPES["first_weight"][1] - 2 * STAGE_UNITS), np.float32)
        for i, (one, *_) in enumerate(rows):
            whole[i] = one.whole
        return cls(stages, np.array([len(r[0].stages) for r in rows], np.int64), whole,
                   np.array([r[1] for r in rows], np.float32), np.array([r[2] for r in rows], np.int64),
                   np.array([r[3] for r in rows], np.int64))

    def rows(self, chosen: np.ndarray) -> Samples:
        return Samples(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part.npz")
        np.savez(part, **{f.name: getattr(self, f.name) for f in fields(self)})
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Samples:
        with np.load(path, allow_pickle=False) as found:
            return cls(*(found[f.name] for f in fields(cls)))


def collect(pipelines: Iterable[int], judge: Advantage | None, seed: int) -> Samples:
    """Tries candidates out during the life of these pipelines under the policy with that judge (None: the planner)."""
    environment, rows, moment = Tuning(), [], 0
    for pipeline in pipelines:
        random = np.random.default_rng((5, seed, pipeline))
        environment.reset(seed=seed, options={"pipeline": pipeline})
        free = 0.0  # the time from which the planner's choice may be left again
        starts = [0.0, *(c.at for c in environment.scenario.changes)]
        while environment.simulator.now < environment.scenario.seconds - HORIZON:
            found, now = environment.found, environment.simulator.now
            lively = any(at <= now < at + (_AFTER if at else _EARLY) for at in starts)
            if len(found) > 1 and random.random() < (_OFTEN if lively else _SELDOM):
                tried = [environment.try_out(one, HORIZON) for one in found]
                rows += [(one, gain, moment, pipeline) for one, gain in zip(found[1:], _gains(environment, tried),
                                                                            strict=True)]
                moment += 1
            bounds = [judge.lower_bound(one) + _UNTRIED for one in found[1:]] if judge and now >= free else []
            best = 1 + int(np.argmax(bounds)) if bounds and max(bounds) > 0 else 0
            free = now + TRIAL_S if best else free
            environment.step(KINDS.index(found[best].kind))
    return Samples.of(rows)


def _gains(environment: Tuning, tried: Sequence[tuple[float, float]]) -> list[float]:
    """The gain of each try but the first, as a share of what the first brought; busy cores have their price."""
    cores = environment.simulator.truth.machine.cores * HORIZON * environment.scenario.interval_s
    values = [rows - PRICE_OF_CORES * used / cores * tried[0][0] for rows, used in tried]
    unit = max(tried[0][0], 0.02 * environment.unit * HORIZON * environment.scenario.interval_s)
    return [float((value - values[0]) / unit) for value in values[1:]]


def teach(pipelines: int, rounds: int, seed: int, work: Path, *, processes: int,
          tell: Callable[[str], None]) -> tuple[Advantage, Samples]:
    """Trains `auto`'s networks. What lies in `work` already is not tried out again."""
    work.mkdir(parents=True, exist_ok=True)
    judge, parts = None, []
    for number in range(rounds):
        share = pipelines // rounds
        chunks = [list(range(first, min(first + _CHUNK, (number + 1) * share)))
                  for first in range(number * share, (number + 1) * share, _CHUNK)]
        todo = [(chunk, judge, seed, work / f"seed{seed}-{chunk[0]}-{chunk[-1]}.npz") for chunk in chunks]
        _gather([one for one in todo if not one[3].exists()], processes)
        parts += [Samples.load(path) for *_, path in todo]
        judge = fit(Samples.join(parts), seed)
        tell(f"round {number + 1} of {rounds}: {sum(len(p.gain) for p in parts)} tries, caution "
             f"{judge.weights['caution'].tolist()}")
    assert judge is not None
    if not judge.never and (gain := proven(judge, range(pipelines, pipelines + _PROOF))) <= 0:
        tell(f"{_PROOF} whole pipelines that it had not seen gain {gain:+.2%} for certain: it is never to be left")
        judge = Advantage({**judge.weights, "caution": np.array([0.0, NEVER])})
    return judge, Samples.join(parts)


def proven(judge: Advantage, pipelines: Iterable[int]) -> float:
    """What whole pipelines gain by these networks over the planner, less 1.65 standard errors. Gains at single moments
    add up to less."""
    gains = []
    for number in pipelines:
        scenario = training(number)
        planned, judged = (run(scenario, policy, seed=number).rows for policy in (Planner(), Auto(judge=judge)))
        gains.append(judged / max(1.0, planned) - 1)
    return float(np.mean(gains) - 1.65 * np.std(gains) / len(gains) ** 0.5)


def _gather(todo: list[tuple[list[int], Advantage | None, int, Path]], processes: int) -> None:
    if processes <= 1 or len(todo) <= 1:
        for one in todo:
            _chunk(one)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes are the parallelism
    with multiprocessing.get_context("spawn").Pool(min(processes, len(todo))) as pool:
        for _ in pool.imap_unordered(_chunk, todo):
            pass
        pool.close()
        pool.join()


def _chunk(one: tuple[list[int], Advantage | None, int, Path]) -> None:
    pipelines, judge, seed, path = one
    collect(pipelines, judge, seed).save(path)


def fit(samples: Samples, seed: int) -> Advantage:
    """Fits the networks, with the caution that the pipelines kept apart require. The same seed gives the same
    result."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network is slower on several, and the sums differ
    try:
        unseen = np.zeros((MEMBERS, len(samples.gain)))
        for fold in range(_FOLDS):
            apart = samples.pipeline % _FOLDS == fold
            if apart.any() and not apart.all():
                unseen[:, apart] = predict(_train(samples.rows(~apart), seed), samples.rows(apart))
        return Advantage({**_train(samples, seed), "caution": np.array(_caution(unseen, samples))})
    finally:
        torch.set_num_threads(threads)


def _train(samples: Samples, seed: int) -> dict[str, np.ndarray]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    random = np.random.default_rng((6, seed))
    w = {name: (torch.randn(shape, generator=generator) * (2 / shape[1]) ** 0.5 if name.endswith("weight")
                else torch.zeros(shape)).requires_grad_() for name, shape in SHAPES.items() if name != "caution"}
    optimiser = Adam(list(w.values()), rate=_RATE)
    known = np.unique(samples.pipeline)
    draws = [np.flatnonzero(np.isin(samples.pipeline, random.choice(known, max(1, int(0.8 * len(known))),
                                                                    replace=False))) for _ in range(MEMBERS)]
    stages, whole = torch.from_numpy(samples.stages), torch.from_numpy(samples.whole)
    present = torch.arange(STAGES)[None, :] < torch.from_numpy(samples.count)[:, None]
    gain = torch.from_numpy(samples.gain).clamp(-_CLIP, _CLIP)
    for step in range(_STEPS):
        rows = torch.from_numpy(np.stack([random.choice(draw, _BATCH) for draw in draws]))
        found = forward(w, stages[rows], present[rows], whole[rows])
        loss = torch.nn.functional.smooth_l1_loss(found, gain[rows], beta=0.1)
        loss = loss + 1e-4 * sum((x * x).sum() for n, x in w.items() if n.endswith("weight"))
        with torch.no_grad():
            optimiser.step(torch.autograd.grad(loss, optimiser.weights), slower=1 - 0.95 * step / _STEPS)
    return {name: x.detach().numpy() for name, x in w.items()}


def forward(w: Mapping[str, Any], stages: Any, present: Any, whole: Any) -> Any:
    """Does what `Advantage.of` does, for many rows at once; returns member × row."""
    import torch

    hidden = torch.relu(torch.einsum("mbsi,mij->mbsj", stages, w["stage_weight"]) + w["stage_bias"][:, None, None])
    there = present[..., None].float()
    mean = (hidden * there).sum(2) / there.sum(2)
    pooled = torch.cat([mean, (hidden * there).amax(2), whole], dim=2)
    first = torch.relu(torch.einsum("mbi,mij->mbj", pooled, w["first_weight"]) + w["first_bias"][:, None])
    second = torch.relu(torch.einsum("mbi,mij->mbj", first, w["second_weight"]) + w["second_bias"][:, None])
    return torch.einsum("mbi,mi->mb", second, w["last_weight"]) + w["last_bias"][:, None]


def _caution(unseen: np.ndarray, samples: Samples) -> tuple[float, float]:
    """The spread and margin with the largest certain gain in pipelines not trained on; NEVER if none brings any."""
    brought = {(spread, margin): _certain(samples, unseen.mean(0) - spread * unseen.std(0) - margin + _UNTRIED)
               for spread in _SPREADS for margin in _MARGINS}
    best = max(brought, key=lambda pair: brought[pair])
    return best if brought[best] > 0 else (0.0, NEVER)


def _certain(samples: Samples, bounds: np.ndarray) -> float:
    """The mean gain a moment of choosing by these bounds, less 1.65 standard errors (over pipelines)."""
    _, first = np.unique(samples.moment, return_index=True)
    gains, pipelines = chosen_gains(samples, bounds), samples.pipeline[first]
    means = np.array([gains[pipelines == p].mean() for p in np.unique(pipelines)])
    return float(means.mean() - 1.65 * means.std() / len(means) ** 0.5) if len(means) else 0.0


def chosen_gains(samples: Samples, bounds: np.ndarray) -> np.ndarray:
    """For each moment, the gain of the candidate with the highest bound above 0, or else 0."""
    gains = []
    for moment in np.unique(samples.moment):
        rows = np.flatnonzero(samples.moment == moment)
        best = rows[bounds[rows].argmax()]
        gains.append(float(samples.gain[best].clip(-1, 1)) if bounds[best] > 0 else 0.0)
    return np.array(gains)


def predict(weights: Mapping[str, np.ndarray], samples: Samples) -> np.ndarray:
    """The gains that the networks expect: member × row."""
    import torch

    present = torch.arange(STAGES)[None, :] < torch.from_numpy(samples.count)[:, None]
    with torch.no_grad():
        w = {n: torch.from_numpy(np.asarray(x, np.float32)) for n, x in weights.items()}
        wide = [torch.from_numpy(x).expand(MEMBERS, *x.shape) for x in (samples.stages, samples.whole)]
        return np.asarray(forward(w, wide[0], present.expand(MEMBERS, *present.shape), wide[1]).numpy())


def save(advantage: Advantage, path: Path, told: Mapping[str, str]) -> None:
    """Saves the networks as safetensors, with what made them (command, seed, table) in the metadata."""
    from safetensors.numpy import save_file

    part = path.with_suffix(".part")
    save_file({n: np.ascontiguousarray(x, np.float32) for n, x in advantage.weights.items()}, part,
              metadata={**told, "format": FORMAT})
    part.replace(path)
