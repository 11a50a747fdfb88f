"""What a stage costs, as level × shape: `StageModel`. Pure: `observe` returns a new object.

The level is the logarithm of a row's seconds with one worker. The shape says how that grows with the workers. A fault
moves the level, and workers move along the shape, so one look at any setting tells the cost at all settings.

The shape is one of some sixty hypotheses (`SHAPES`), each with a probability. The level may jump at any time, which is
a change point. Both are weighed by their likelihood. Items under way that are older than usual are evidence too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.ingest.stats import StageStats

_CAPS = (1.0, 1.5, 2.25, 3.4, 5.0, 7.6, 11.4, 17.0, 26.0, 38.0, 58.0, 86.0)
_CLIFFS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 45, 64)


def _list_shapes() -> ndarray:
    """Returns the kind and the parameters of each hypothesis: flat, queue, crowd, cap, cliff and turns.

    `turns` is a service for one caller at a time that also loses time when it turns to another caller."""
    rows = [(0, 0.0, 0.0)]
    rows += [(1, share, 0.0) for share in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)]
    rows += [(2, share, 0.0) for share in (1e-4, 5e-4, 2e-3, 4e-3, 1e-2, 2.5e-2, 6e-2, 0.12, 0.25)]
    rows += [(3, most, 0.0) for most in _CAPS]
    rows += [(4, edge, factor) for edge in _CLIFFS for factor in (1.5, 2.5, 4.5, 30.0)]
    rows += [(5, 0.0, factor) for factor in (1.5, 2.5)]
    return np.array(rows)


SHAPES = _list_shapes()
COMPUTES = np.isin(SHAPES[:, 0], (2, 4))
"""The shapes whose added cost is processor time, and not only waiting."""

_RARE = -4.0  # by which the logarithm of a rare shape's prior is lower
_MISFIT = 0.03  # no shape is known better than this, as a share of the cost
_COARSE = 0.2  # the shapes lie so far apart, as a share of a shape's logarithm
_BENT, _REACH = 0.15, 0.5  # costs bend so far from a shape, over so much of a logarithm of workers
_SHARE_SPREAD = 0.07  # of a share of processor time
_SUREST = 0.01  # no cost is known better, as a share of it
_DRIFT = 0.01  # by which a level may wander in a second
_HAZARD = 0.01  # change points a look, before any data
_JUMP = 0.8  # how far a level jumps
_ODDS = 3.0  # log odds at which a change point is believed
_SUSPECT = -2.0  # log odds from which the next look must tell
_DOUBTFUL_LOOKS = 3  # at which a change point is waited for
_WEAK = -6.0  # log odds down to which a suspicion is kept in mind
_LEAST_STEP = math.log(1.12)  # a smaller step is no change point
_FLOOR = 0.03  # least noise of a look
_FEW_ITEMS, _MOST_ITEMS = (
    0.3,
    12.0,
)  # noise of a mean that needs no more items; the most items waited for
_ALL = 50  # items that are uneven together show a sway of all costs
_UNEVEN, _MISSED = (
    0.5,
    6.0,
)  # noise of a heavy tail; items that must be missing then, before any is an event
_AGED = 1 / 0.35**2  # the weight of a cost that items under way show
_IDLE = 0.02  # of the time of its workers: of a stage that works less, a known cost stays as it is
_GUESSED = 1 / 0.4**2  # the weight of a cost that was seen on another back end
_KEPT = 12  # sightings
_HELD = 0.1  # of the time: if the lock is held less, a wait for it cannot be measured


@functools.cache
def log_shape(workers: int) -> ndarray:
    """Returns the logarithm of each shape at this number of workers."""
    kind, a, factor = SHAPES.T
    growth = np.ones(len(SHAPES))
    growth = np.where(kind == 1, 1 + a * (workers - 1), growth)
    growth = np.where(kind == 2, 1 + a * workers * (workers - 1), growth)
    growth = np.where(kind == 3, np.maximum(1.0, workers / np.maximum(a, 1e-9)), growth)
    growth = np.where((kind == 4) & (workers > a), factor, growth)
    return np.log(np.where((kind == 5) & (workers > 1), factor * workers, growth))


@functools.cache
def _log_prior() -> ndarray:
    """Returns the logarithm of each shape's prior: kinds are equally likely, but for turns, which are rare, and so are
    the shapes of a kind."""
    of = SHAPES[:, 0].astype(int)
    return np.asarray(-np.log(np.bincount(of)[of]) + np.where(of == 5, _RARE, 0.0))


@dataclass(frozen=True, slots=True)
class Sighting:
    """The mean cost at one number of workers since one change point."""

    epoch: int
    workers: int
    log_s: float
    """The logarithm of a row's seconds."""
    weight: float
    """One over the variance of `log_s`."""
    at: float
    cpu_share: float = 0.0
    """Processor time as a share of the useful time."""
    bound: int = 0
    """1: some of its items began before the change point, so a row costs at least this. -1: at most this."""


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """What is known of a stage's cost: the probability of each shape, and the level under each."""

    p: ndarray
    level: ndarray
    variance: ndarray
    log_workers: ndarray
    """Of the sightings."""
    pull: ndarray
    """Of each sighting and shape: by how much costs nearby differ from the shape."""
    precision: ndarray
    """Between the sightings."""
    shapes: ndarray
    """Of each sighting and shape: the logarithm of the shape."""
    _known: dict[int, tuple[ndarray, ndarray]] = field(default_factory=dict)

    def costs(self, workers: ndarray) -> ndarray:
        """Returns the logarithm of the cost with these numbers of workers under each shape.

        What was seen counts more than the shape: near a sighting, the cost is the one that was seen."""
        return np.asarray(
            self.level + _log_shapes(tuple(workers.tolist())) + self._near(workers) @ self.pull
        )

    def at(self, workers: int) -> tuple[ndarray, ndarray]:
        """Returns the same for one number of workers, and its variance under each shape."""
        if workers not in self._known:
            near = self._near(np.array([workers]))[0]
            bent = max(0.0, _BENT**2 - float(near @ self.precision @ near))
            shape = log_shape(workers)
            coarse = _COARSE * np.abs(shape - self.shapes).min(0)
            variance = self.variance + np.minimum(bent, coarse**2)
            self._known[workers] = self.level + shape + near @ self.pull, variance
        return self._known[workers]

    def _near(self, workers: ndarray) -> ndarray:
        apart = np.abs(np.log(workers)[:, None] - self.log_workers[None])
        return np.asarray(_BENT**2 * np.exp(-apart / _REACH))


@functools.lru_cache(maxsize=512)
def _posterior(seen: tuple[Sighting, ...], now: int, at: float | None) -> Posterior:
    log_p = _log_prior().copy()
    newest = max(s.at for s in seen) if at is None else at
    shapes = _log_shapes(tuple(s.workers for s in seen))
    epoch_of = np.array([s.epoch for s in seen])
    bounds = np.array([s.bound for s in seen])
    log_s = np.array([s.log_s for s in seen])
    spread = np.array(
        [1 / s.weight + _MISFIT**2 + _DRIFT**2 * max(0.0, newest - s.at) for s in seen]
    )
    off = log_s[:, None] - shapes
    level = variance = np.zeros(len(SHAPES))
    epochs: list[tuple[ndarray, ndarray, ndarray]] = []
    for epoch in sorted(set(epoch_of.tolist())):
        own = epoch_of == epoch
        surest = shapes[own][np.argmin(spread[own])]
        weight = 1 / (spread[own, None] + (_COARSE * (shapes[own] - surest)) ** 2)
        sides = bounds[own, None]
        counts = weight * (sides == 0) if (sides == 0).any() else weight
        mean = (counts * off[own]).sum(0) / counts.sum(0)
        off[own] -= mean
        # A bound only contradicts a cost on its other side.
        off[own] = np.where(sides * off[own] < 0, 0.0, off[own])
        if own.sum() > 1:
            misfit = weight * off[own] ** 2 - np.log(weight * spread[own, None])
            log_p -= 0.5 * misfit.sum(0)
        epochs.append((mean, 1 / counts.sum(0), surest))
        if epoch == now:
            level, variance = mean, 1 / counts.sum(0)
            shares = np.array([s.cpu_share for s in seen])[own, None]
            log_p -= _misfit_of_shares(shares, np.exp(-shapes[own] * ~COMPUTES))
    for before, after in itertools.pairwise(epochs):
        log_p += _log_jump(before, after)
    p = np.exp(log_p - log_p.max())
    log_workers = np.log([s.workers for s in seen])
    apart = np.abs(log_workers[:, None] - log_workers[None])
    precision = np.linalg.inv(_BENT**2 * np.exp(-apart / _REACH) + np.diag(spread))
    return Posterior(p / p.sum(), level, variance, log_workers, precision @ off, precision, shapes)


def _misfit_of_shares(shares: ndarray, left: ndarray) -> ndarray:
    """Returns how unlikely the shares of processor time are under each shape.

    Where a shape adds only waiting, the share falls as the cost grows: to `left` times what it is at first."""
    first = np.minimum(1.0, (shares * left).sum(0) / (left * left).sum(0))
    return np.asarray(0.5 * ((shares - first * left) ** 2).sum(0) / _SHARE_SPREAD**2)


def _log_jump(
    before: tuple[ndarray, ndarray, ndarray], after: tuple[ndarray, ndarray, ndarray]
) -> ndarray:
    """Returns how likely two epochs are under each shape: either the level jumped, or the shape explains it all.

    So a cost that rises at each of our own changes is blamed on the shape in the end, and not on as many events."""
    jump = (after[0] - before[0]) ** 2
    same = before[1] + after[1] + (_COARSE * (after[2] - before[2])) ** 2
    far = same + _JUMP**2
    stayed = math.log(1 - _HAZARD) - 0.5 * (jump / same + np.log(same))
    jumped = math.log(_HAZARD) - 0.5 * (jump / far + np.log(far))
    return np.asarray(np.logaddexp(stayed, jumped))


@functools.lru_cache(maxsize=512)
def _log_shapes(counts: tuple[int, ...]) -> ndarray:
    return np.array([log_shape(n) for n in counts])


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Looks that may follow a change point, taken together. More of them tell."""

    log_s: float
    variance: float
    log_odds: float
    looks: int = 1

    @property
    def is_strong(self) -> bool:
        """Whether the next look should tell before anything is decided. It is not waited for without end."""
        return self.log_odds > _SUSPECT and self.looks <= _DOUBTFUL_LOOKS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """All that is known of a stage on its present back end, and the sightings of those that it has left."""

    name: str
    backend: str = "thread"
    seen: tuple[Sighting, ...] = ()
    epoch: int = 0
    """How many change points there were."""
    factor: float = 1.0
    """How many times dearer the last change point made a row."""
    cpu_share: float = 0.0
    """Processor time as a share of the useful time."""
    turn_s: float | None = None
    """Seconds for which an item waits for a lock that is always held, in a stage that hardly holds it itself. None: not
    measured yet."""
    item_rows: float = 0.0
    item_bytes: float = 0.0
    process_bytes: int = 0
    noise: float = 0.2
    """Relative noise of one item, learned."""
    sway: float = 0.0
    """Relative noise that many items have together, learned."""
    measured: int = 0
    """How many looks taught that."""
    elsewhere: Mapping[str, tuple[tuple[Sighting, ...], int]] = field(default_factory=dict)
    """Back end → its sightings and their epoch."""
    suspicion: Suspicion | None = None
    _from: tuple[StageStats, float] | None = None
    _bound_to: float = 0.0  # until then, items end that began before the last change point
    _skip_to: int = 0  # items that began before a resize end until this count

    @property
    def known(self) -> bool:
        """Whether the present cost was seen, or guessed after a move."""
        return any(s.epoch == self.epoch for s in self.seen)

    def is_fresh(self, workers: int) -> bool:
        """Whether the cost with so many workers was seen since the last change point."""
        return any(
            s.epoch == self.epoch and s.workers == workers and s.weight > _AGED for s in self.seen
        )

    @property
    def is_stuck(self) -> bool:
        """Whether no item has ended since the last change point, which their age has shown."""
        return self.seen[-1].weight == _AGED

    @property
    def is_doubtful(self) -> bool:
        """Whether the last look may have followed a change point."""
        return self.suspicion is not None and self.suspicion.is_strong

    # ---- learning

    def observe(
        self, now: StageStats, at: float, lock_share: float = 0.0, held: float = 0.0
    ) -> StageModel:
        """Returns the model after one more look.

        `lock_share`: how much of the working time waited for the lock. `held`: how much of all time another held it,
        if this stage hardly holds it itself."""
        if now.process_bytes > self.process_bytes:
            return replace(self, process_bytes=now.process_bytes).observe(now, at, lock_share, held)
        if now.backend != self.backend:
            return self._move(now, at)
        guessed = self.seen and not any(
            s.epoch == self.epoch and s.weight > _GUESSED for s in self.seen
        )
        if self._from is None or now.items < self._from[0].items or (now.starting and guessed):
            return replace(self, _from=(now, at))
        then, then_at = self._from
        if (then.workers, then.starting) != (now.workers, now.starting):
            # Work that began before a resize belongs to the old number of workers.
            busy = (now.busy_s - then.busy_s) / max(1e-6, at - then_at)
            old = min(then.workers, math.ceil(busy)) if now.finished_s < now.busy_s - 1e-9 else 0
            if not old or now.items - then.items < 3 * old:
                left = old - (now.items - then.items)
                skip = now.items + left if left > 0 and self.noise <= _UNEVEN else 0
                return replace(self, _from=(now, at), _skip_to=skip, suspicion=None)
        elif self._skip_to:
            if now.items >= self._skip_to:
                return replace(self, _from=(now, at), _skip_to=0)
            stuck = now.items == then.items
            return self._watch(now, then, at - then_at, at) if stuck else self
        if now.items == then.items or now.rows <= then.rows or now.finished_s <= then.finished_s:
            return self._watch(now, then, at - then_at, at)
        workers = max(1, now.workers)
        if now.busy_s - then.busy_s < _IDLE * workers * (at - then_at) and self.is_fresh(workers):
            return replace(self, _from=(now, at))  # what it costs now says little of a busy stage
        # The mean of few items of a heavy tail is mostly too low.
        enough = max(2.0, min(_MOST_ITEMS, (self.noise / _FEW_ITEMS) ** 2))
        patience_s = 1.0 if enough <= 2 else 2.0
        if now.items - then.items < enough and at - then_at < patience_s and not self.is_doubtful:
            return self
        return self._measure(now, then, at, lock_share, held)

    def _move(self, now: StageStats, at: float) -> StageModel:
        """Returns the model on another back end. A row is first taken to be as dear as it was with as many workers."""
        past = {**self.elsewhere, self.backend: (self.seen, self.epoch)}
        seen, epoch = past.pop(now.backend, ((), 0))
        if not seen and self.known:
            left = (s for s in self.seen if s.epoch == self.epoch)
            surest = max(left, key=lambda s: s.weight)
            seen = (replace(surest, epoch=epoch, weight=_GUESSED, at=at),)
        return replace(
            self,
            backend=now.backend,
            seen=seen,
            epoch=epoch,
            elsewhere=past,
            suspicion=None,
            _from=(now, at),
            _skip_to=0,
        )

    def _measure(
        self, now: StageStats, then: StageStats, at: float, lock_share: float, held: float
    ) -> StageModel:
        """Returns the model after finished items."""
        items, rows = now.items - then.items, now.rows - then.rows
        busy_s, finished_s = now.busy_s - then.busy_s, now.finished_s - then.finished_s
        # Waits for a core, and processor time, are counted of all work, also of items under way.
        whole = max(busy_s, 1e-12)
        cpu = min(1.0, (now.cpu_s - then.cpu_s) / whole)
        waited = (now.core_wait_s - then.core_wait_s) / whole + lock_share
        useful = max(1 - waited, cpu, 1e-3)
        share = min(1.0, max(0.0, cpu / useful))
        turn_s = self.turn_s
        if held > _HELD:
            new = lock_share * finished_s / items / held
            turn_s = new if turn_s is None else turn_s + 0.3 * (new - turn_s)
        learned = replace(
            self,
            _from=(now, at),
            turn_s=turn_s,
            item_rows=rows / items,
            item_bytes=max(0.99 * self.item_bytes, (now.bytes - then.bytes) / items),
            cpu_share=self.cpu_share + 0.4 * (share - self.cpu_share) if self.known else share,
        )
        variance = _FLOOR**2 + self.noise**2 / items + self.sway**2 + (0.3 * lock_share) ** 2
        workers = max(1, now.workers - now.starting)
        # Of uneven items the short ones end first. So the less even they are, the more counts the time of all work.
        uneven = min(1.0, self.noise**2)
        seconds = finished_s ** (1 - uneven) * whole**uneven
        # The logarithm of a mean of few uneven items is too low on average.
        log_s = math.log(useful * seconds / rows) + min(0.5, self.noise**2 / (2 * items))
        return learned._take(Sighting(self.epoch, workers, log_s, 1 / variance, at, share), items)

    def _watch(self, now: StageStats, then: StageStats, seconds: float, at: float) -> StageModel:
        """Returns the model after a look at which nothing had ended. Items under way may be older than usual."""
        active = (now.busy_s - then.busy_s) / max(seconds, 1e-6)
        # Only of a busy stage is known how many items are under way.
        busy = active >= 0.5 * max(1, now.workers)
        if not self.known or not self.item_rows or not busy or seconds < 0.1:
            return self
        if self.cpu_share > 0.5:  # perhaps it waits for a core
            return self
        age = (now.busy_s - now.finished_s) / active
        workers = max(1, now.workers - now.starting)
        usual = math.exp(self.level(workers)[0]) * self.item_rows
        expected = active * seconds / usual  # items that would have ended meanwhile
        uneven = self.noise > _UNEVEN and expected < _MISSED
        if age < 1.35 * usual * (1 + self.noise) or uneven:
            return self
        # The age is a lower bound. The true cost is about a quarter more, and uncertain.
        last, log_s = self.seen[-1], math.log(1.25 * age / self.item_rows)
        new = Sighting(self.epoch, workers, log_s, _AGED, at, self.cpu_share)
        if last.epoch != self.epoch or last.weight != _AGED:
            return self._begin_epoch(new)
        # No item has ended since this change point was believed, so it is still the same one, and all these numbers
        # of workers were too many, or too few.
        others = (s for s in self.seen if (s.epoch, s.workers) != (self.epoch, workers))
        aged = (replace(s, log_s=log_s, at=at) if s.weight == _AGED else s for s in others)
        return replace(self, seen=(*aged, new)[-_KEPT:])

    def _take(self, new: Sighting, items: float) -> StageModel:
        """Returns the model with one measured cost: a sighting, a suspicion or a change point."""
        if not self.known:
            return replace(self, seen=(*self.seen[1 - _KEPT :], new))
        log_s, variance = new.log_s, 1 / new.weight
        error = log_s - self.level(new.workers, new.at)[0]
        sides = [s.bound for s in self.seen if s.epoch == self.epoch]
        # How large the last change was is not known yet. But a cost on the other side of its bound is another change.
        if all(sides) and error * sides[-1] > -_LEAST_STEP:
            return self._average(replace(new, bound=sides[-1] * (new.at < self._bound_to)))
        learned = self._learn_noise(error, items)
        # Each shape predicts this cost, so a cost that a likely shape explains is no event.
        log_same = self._log_likelihood(new)
        before, mean, spread = self.suspicion, log_s, variance
        if before is not None:
            both = before.variance + variance
            log_new = -0.5 * (log_s - before.log_s) ** 2 / both - 0.5 * math.log(both)
            # What all costs have in common at two looks tells only once.
            alone = 1 - self.sway**2 / variance
            odds = before.log_odds + alone * (log_new - max(log_same, -8.0))
            spread = before.variance * variance / both
            mean = spread * (before.log_s / before.variance + log_s / variance)
        else:
            jumped = _JUMP**2 + variance
            log_new = -0.5 * error * error / jumped - 0.5 * math.log(jumped)
            odds = math.log(_HAZARD) + log_new - max(log_same, -9.0 if items < 30 else -14.0)
        looks = 1 + (before.looks if before is not None and before.log_odds > _SUSPECT else 0)
        step = mean - (log_s - error)  # from the expected cost
        is_step = abs(step) > _LEAST_STEP
        suspicion = Suspicion(mean, spread, odds, looks) if is_step and odds > _WEAK else None
        if is_step and odds > _ODDS:
            sure = self if self.measured > _DOUBTFUL_LOOKS else learned  # an event is no noise
            first = replace(new, log_s=mean, weight=1 / spread, bound=1 if step > 0 else -1)
            began = sure._begin_epoch(first)
            return replace(began, _bound_to=new.at + math.exp(mean) * self.item_rows)
        if suspicion is not None and suspicion.is_strong:
            return replace(self, suspicion=suspicion)
        likely = suspicion is not None and suspicion.log_odds > 0  # an event is no noise
        return replace(self if likely else learned, suspicion=suspicion)._average(new)

    def _learn_noise(self, error: float, items: float) -> StageModel:
        """Returns the model with the noise that this error shows. An event is not taken for noise.

        Few items differ by chance. If many items together are dearer, it is the sway of all costs."""
        pace = max(0.1, 1 / (3 + self.measured))
        learned = replace(self, measured=self.measured + 1)
        of_all = error * error - _FLOOR**2
        if items > _ALL:
            off = math.sqrt(max(0.0, of_all - self.noise**2 / items))
            off = min(off, 2.5 * self.sway + 0.1)
            sway = math.sqrt(self.sway**2 + pace * (off**2 - self.sway**2))
            return replace(learned, sway=min(0.5, sway))
        off = math.sqrt(max(0.0, of_all - self.sway**2) * min(items, 10))
        off = min(off, 2.5 * self.noise + 0.1)
        noise = self.noise + pace * (off - self.noise)
        return replace(learned, noise=min(2.5, max(0.03, noise)))

    def _log_likelihood(self, new: Sighting) -> float:
        """Returns the logarithm of how likely a measured cost is without a change point."""
        known = self.posterior(new.at)
        costs, variance = known.at(new.workers)
        off, both = new.log_s - costs, variance + 1 / new.weight
        each = np.log(known.p + 1e-300) - 0.5 * off**2 / both - 0.5 * np.log(both)
        return float(np.logaddexp.reduce(each))

    def _average(self, new: Sighting) -> StageModel:
        """Returns the model with a cost that is no surprise."""
        kept = []
        surest = 1 / max(_SUREST, self.sway / 3) ** 2
        for s in self.seen:
            if (s.epoch, s.workers) != (new.epoch, new.workers):
                kept.append(s)
            elif not s.bound:
                total = 1 / (1 / s.weight + _DRIFT**2 * max(0.0, new.at - s.at)) + new.weight
                share = new.weight / total
                new = replace(
                    new,
                    log_s=s.log_s + (new.log_s - s.log_s) * share,
                    cpu_share=s.cpu_share + (new.cpu_share - s.cpu_share) * share,
                    weight=min(total, surest),
                )
        return replace(self, seen=(*kept, new)[-_KEPT:])

    def _begin_epoch(self, new: Sighting) -> StageModel:
        """Returns the model after a change point."""
        return replace(
            self,
            epoch=self.epoch + 1,
            factor=math.exp(new.log_s - self.level(new.workers)[0]),
            seen=(*self.seen[1 - _KEPT :], replace(new, epoch=self.epoch + 1)),
            suspicion=None,
        )

    # ---- knowing

    def posterior(self, at: float | None = None) -> Posterior:
        """Returns what is known of the cost."""
        return _posterior(self.seen, self.epoch, at)

    def level(self, workers: int, at: float | None = None) -> tuple[float, float]:
        """Returns the expected logarithm of a row's seconds with so many workers, and its spread."""
        known = self.posterior(at)
        costs, variance = known.at(workers)
        mean = float(known.p @ costs)
        return mean, math.sqrt(float(known.p @ ((costs - mean) ** 2 + variance)))

    def curve(self, workers: ndarray, favour: float = 0.0) -> ndarray:
        """Returns the seconds of a row with each of these numbers of workers.

        With `favour`, the cost is as low as it is with that probability."""
        known = self.posterior()
        costs = known.costs(workers)
        if not favour:
            return np.asarray(np.exp(costs @ known.p))
        order = np.argsort(costs, axis=1)
        rows = np.arange(len(workers))
        lowest = np.argmax(np.cumsum(known.p[order], axis=1) >= favour, axis=1)
        return np.asarray(np.exp(costs[rows, order[rows, lowest]]))

    def on(self, backend: str) -> StageModel | None:
        """Returns the model on a back end that the stage has left. None: it was never seen there."""
        seen, epoch = self.elsewhere.get(backend, ((), 0))
        left = replace(self, backend=backend, seen=seen, epoch=epoch, elsewhere={})
        return left if seen and left.known else None

    # ---- for the record and the next run

    def describe(self, workers: int) -> dict[str, float]:
        """Returns the cost with so many workers in numbers, for the record."""
        log_s, spread = self.level(workers)
        return {
            "workers": workers,
            "busy_us_a_row": 1e6 * math.exp(log_s),
            "cpu_us_a_row": 1e6 * self.cpu_share * math.exp(log_s),
            "spread": spread,
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns what another run can use, for JSON."""
        now = [asdict(s) for s in self.seen if s.epoch == self.epoch]
        return {
            "backend": self.backend,
            "cpu_share": self.cpu_share,
            "seen": now,
        }

    def recall(self, values: Mapping[str, Any], trust: float) -> StageModel:
        """Returns the model with what an earlier run has learned. No sighting gets more weight than `trust`."""
        seen = tuple(
            Sighting(
                epoch=0,
                workers=int(s["workers"]),
                log_s=float(s["log_s"]),
                weight=min(trust, float(s["weight"])),
                at=0.0,
                cpu_share=float(s["cpu_share"]),
            )
            for s in values["seen"]
        )
        return replace(
            self,
            backend=values["backend"],
            cpu_share=float(values["cpu_share"]),
            seen=seen,
        )
