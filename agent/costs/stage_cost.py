"""Learns the cost of one stage from snapshots while it runs: `StageCost`. Each observation returns a new object.

The model is the useful time a row at each number of workers that was observed. Useful time includes no waits for
neighbours or for cores. So an idle stage teaches as much as the bottleneck does.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.ingest.stats import StageStats


def between(few: int, many: int) -> int:
    """Returns the number half-way between two numbers of workers, by ratio. `few` itself if none lies between."""
    return min(max(few + 1, math.isqrt(few * many)), max(few, many - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The cost of a row at one number of workers."""

    busy_s: float
    cpu_s: float
    variance: float = 0.0
    """The variance of the observations' relative error."""
    seen: int = 1

    @property
    def wait_s(self) -> float:
        """Seconds a row in which the worker waits, for a lock or a store."""
        return max(0.0, self.busy_s - self.cpu_s)

    def towards(self, busy_s: float, cpu_s: float, learning: float) -> Point:
        """Returns the point moved towards an observation by the share `learning`. Early observations count more."""
        weight = max(learning, 1 / (self.seen + 1))
        error = busy_s / self.busy_s - 1
        return Point(
            busy_s=self.busy_s + weight * (busy_s - self.busy_s),
            cpu_s=self.cpu_s + weight * (cpu_s - self.cpu_s),
            variance=(1 - weight) * (self.variance + weight * error * error),
            seen=self.seen + 1,
        )

    def scaled(self, busy: float, cpu: float) -> Point:
        """Returns the point with both costs multiplied. Its number of observations starts again."""
        return replace(self, busy_s=self.busy_s * busy, cpu_s=self.cpu_s * cpu, seen=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of one stage, as far as it has been observed."""

    name: str
    points: Mapping[int, Point] = field(default_factory=dict)
    """Number of workers → cost of a row. Empty: the stage has not reported yet, and the planner leaves it alone."""
    item_bytes: float = 0.0
    """Bytes of an item, nearer to the larger ones. A worker holds one item while it works."""
    item_rows: float = 0.0
    """Rows of an item in the latest observation."""
    process_bytes: int = 0
    """Measured memory of a worker's process. 0: none was measured yet."""
    drifts: int = 0
    """How many times the cost of a row has changed."""
    leaps: int = 0
    """How many of the `drifts` were too large for a change of knobs to explain them."""
    trends: int = 0
    """How many times the cost has changed as much in small steps."""
    residual: float = 0.0
    """The recent relative error of expected costs, as a share of them."""
    age: int = 0
    """Snapshots since the model last learned. Large: the stage is idle or very slow."""
    backend: str = ""
    other_backends: Mapping[str, Mapping[int, Point]] = field(default_factory=dict)
    """Back end → points, for back ends that the stage has left."""
    settings: PlannerSettings = DEFAULT
    # The counters at the start of the present observation.
    _observed_from: StageStats | None = None
    surprise: float = 0.0
    """The logarithm of how many times dearer a row was at the last look, if noise does not explain it. Otherwise 0."""
    # The largest difference that did not stay. It is slowly forgotten.
    _noise: float = 0.0
    # (workers, their point) when the whole curve was last moved with that point.
    _curve_moved_at: tuple[int, Point] | None = None
    # The logarithm of the factor by which the curve was moved since that last counted as a trend.
    _moved_since_trend: float = 0.0

    def observe(self, latest: StageStats, saturated: bool, starting: bool = False) -> StageCost:
        """Returns the cost after one more snapshot of the stage.

        `saturated`: no core was free. If waits for a core are not counted, part of the busy time was such a wait.
        `starting`: some processes are starting. Stages are then starved or blocked, and their costs mean little."""
        if latest.process_bytes > self.process_bytes:
            return replace(self, process_bytes=latest.process_bytes).observe(
                latest, saturated, starting
            )
        if latest.backend != self.backend:
            return self._switch_backend(latest)
        earlier = self._observed_from
        if (
            starting
            or earlier is None
            or earlier.workers != latest.workers
            or latest.items < earlier.items
        ):
            # Work that began before a resize belongs to neither setting.
            return replace(self, _observed_from=latest)
        items = latest.items - earlier.items
        rows = latest.rows - earlier.rows
        core_wait_s = latest.core_wait_s - earlier.core_wait_s
        cpu_s = latest.cpu_s - earlier.cpu_s
        busy_s = latest.finished_s - earlier.finished_s
        busy_s = max(busy_s - core_wait_s, min(cpu_s, busy_s))
        if (
            items < self.settings.min_items
            or rows <= 0
            or busy_s <= 0
            or min(cpu_s, core_wait_s) < 0
        ):
            return replace(self, age=self.age + 1)
        observed = replace(
            self,
            _observed_from=latest,
            item_bytes=max(
                self.settings.forget_factor * self.item_bytes,
                (latest.bytes - earlier.bytes) / items,
            ),
            item_rows=rows / items,
            age=0,
            surprise=0.0,
        )
        busy_s /= rows
        cpu_s /= rows
        if saturated and not core_wait_s and self.points:
            busy_s = min(busy_s, max(cpu_s + self._nearest(latest.workers).wait_s, cpu_s))
        return observed._learn(latest.workers, Point(busy_s=busy_s, cpu_s=cpu_s), self.surprise)

    def _switch_backend(self, latest: StageStats) -> StageCost:
        """Returns the cost after a change of the back end, with the points that were measured there."""
        known = dict(self.other_backends)
        if self.points:
            known[self.backend] = self.points
        return replace(
            self,
            backend=latest.backend,
            points=known.pop(latest.backend, {}),
            _observed_from=latest,
            surprise=0.0,
            _curve_moved_at=None,
            other_backends=known,
        )

    def _learn(self, workers: int, measured: Point, last_surprise: float) -> StageCost:
        """Returns the cost with the point `measured` taken in.

        A difference that noise explains moves the point. A larger one changes the whole curve once the next look shows
        it too."""
        known = self.points.get(workers)
        ratio = measured.busy_s / self.busy_s(workers) if self.points else 1.0
        residual = self.residual + self.settings.learning_weight * (
            min(abs(ratio - 1), 1.0) - self.residual
        )
        if known is None or not known.seen:
            return replace(self, residual=residual, points={**self.points, workers: measured})
        # A settled stage that becomes dearer needs an answer soon, so a smaller difference counts there. Two looks in a
        # row that exceed all earlier noise are rare, whatever its distribution.
        settings, surprise = self.settings, math.log(ratio)
        settled = known.seen >= settings.certain_ticks
        least = settings.rise_ratio if settled and ratio > 1 else settings.dearer_ratio
        usual = min(settings.leap_ratio * self._noise, math.log(settings.leap_ratio))
        if abs(surprise) < max(math.log(least), usual):
            surprise = 0.0
        if surprise * last_surprise > 0:
            # The curve keeps its shape, because the contention that bent it is still there.
            cpu_ratio = measured.cpu_s / known.cpu_s if known.cpu_s > 0 else 1.0
            return replace(
                self,
                drifts=self.drifts + 1,
                leaps=self.leaps + (ratio >= self.settings.leap_ratio),
                residual=residual,
                other_backends={},
                _curve_moved_at=None,
                points={n: point.scaled(ratio, cpu_ratio) for n, point in self.points.items()},
            )
        noise = max(self.settings.forget_factor * self._noise, abs(last_surprise))
        if surprise:
            return replace(self, residual=residual, surprise=surprise, _noise=noise)
        nearer = known.towards(measured.busy_s, measured.cpu_s, self.settings.learning_weight)
        learned = replace(
            self,
            residual=residual,
            _noise=max(noise, abs(math.log(ratio))),
            points={**self.points, workers: nearer},
        )
        return learned._move_curve(workers, known)

    @property
    def doubtful(self) -> bool:
        """Whether the last look showed a dearer row. The next look shows whether the cost stays there."""
        return self.surprise > 0

    def _move_curve(self, workers: int, known: Point) -> StageCost:
        """Returns the cost with the whole curve moved along, if its present point has drifted far.

        The other points were observed earlier, so they miss the drift. `known` is the present point before the latest
        observation."""
        now = self.points[workers]
        count, then = self._curve_moved_at or (0, known)
        if known.seen < self.settings.certain_ticks:
            return self
        if count != workers:
            return replace(self, _curve_moved_at=(workers, known))._move_curve(workers, known)
        busy_ratio = now.busy_s / then.busy_s
        cpu_ratio = now.cpu_s / then.cpu_s if then.cpu_s > 0 else 1.0
        noise = math.sqrt(self.settings.learning_weight * now.variance)
        if abs(math.log(busy_ratio)) < math.log(self.settings.headroom_ratio) + noise:
            return self
        points = {
            n: replace(p, busy_s=p.busy_s * busy_ratio, cpu_s=p.cpu_s * cpu_ratio)
            for n, p in self.points.items()
        }
        moved = self._moved_since_trend + math.log(busy_ratio)
        trend = abs(moved) >= math.log(self.settings.dearer_ratio)
        return replace(
            self,
            points={**points, workers: now},
            _curve_moved_at=(workers, now),
            trends=self.trends + trend,
            _moved_since_trend=0.0 if trend else moved,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the measured costs for JSON, without the unfinished observation."""
        return {
            "backend": self.backend,
            "item_bytes": self.item_bytes,
            "residual": self.residual,
            "process_bytes": self.process_bytes,
            "points": _plain(self.points),
            "elsewhere": {b: _plain(points) for b, points in self.other_backends.items()},
        }

    @classmethod
    def from_dict(
        cls, name: str, values: Mapping[str, Any], settings: PlannerSettings = DEFAULT
    ) -> StageCost:
        """Returns the cost that `to_dict` has written."""
        return cls(
            name=name,
            settings=settings,
            backend=values["backend"],
            item_bytes=values["item_bytes"],
            residual=values["residual"],
            points=_points(values["points"]),
            process_bytes=values["process_bytes"],
            other_backends={b: _points(points) for b, points in values["elsewhere"].items()},
        )

    def on(self, backend: str) -> StageCost:
        """Returns the expected cost on another back end.

        If the stage never ran there, this is its cost with the fewest workers here, which hardly disturb each other."""
        least = min(self.points)
        points = self.other_backends.get(backend) or {least: self.points[least]}
        return replace(self, backend=backend, points=points)

    def relieved(self) -> StageCost:
        """Returns the cost if its workers no longer wait for each other.

        A stage that held the same lock has then moved to another back end."""
        most = self.settings.rise_ratio * self.points[min(self.points)].busy_s
        return replace(self, points={n: p for n, p in self.points.items() if p.busy_s <= most})

    def known_well(self, workers: int) -> StageCost:
        """Returns the cost with the points of the present number of workers, the smallest, and those seen often.

        The other points were seen only briefly, perhaps while costs were changing already."""
        return replace(
            self,
            points={
                n: p
                for n, p in self.points.items()
                if n in (workers, min(self.points)) or p.seen > self.settings.patience_ticks
            },
        )

    def stale(self) -> StageCost:
        """Returns the same cost, but the next observation of a point replaces all earlier ones."""
        return replace(self, points={n: replace(p, seen=0) for n, p in self.points.items()})

    def unhindered(self) -> StageCost:
        """Returns the cost if the workers hardly waited for a lock or a store."""
        return replace(
            self,
            points={
                n: replace(p, busy_s=max(p.cpu_s, self.settings.min_wait_share * p.busy_s))
                for n, p in self.points.items()
            },
        )

    @property
    def locked(self) -> bool:
        """Whether the workers wait for each other. More of them made a row dearer, and the added time is waiting."""
        least = self.points[min(self.points)]
        return any(
            p.busy_s >= self.settings.dearer_ratio * least.busy_s
            and p.wait_s - least.wait_s >= self.settings.mostly_share * (p.busy_s - least.busy_s)
            for p in self.points.values()
        )

    def _nearest(self, workers: int) -> Point:
        return self.points[min(self.points, key=lambda n: (abs(n - workers), n))]

    @property
    def most_seen(self) -> int:
        """The largest number of workers that was observed."""
        return max(self.points, default=0)

    def cpu_s(self, workers: int) -> float:
        """Returns the expected processor seconds a row with `workers`, interpolated as in `busy_s`."""
        return self._between(workers, lambda point: point.cpu_s)

    def busy_s(self, workers: int) -> float:
        """Returns the useful seconds a row that each of `workers` is expected to need.

        Between two observed numbers of workers, the value lies on the line between them. Above all of them it follows
        the last slope, because part of the work cannot run in parallel. Below all it is the value of the smallest."""
        return self._between(workers, lambda point: point.busy_s)

    def _between(self, workers: int, cost: Callable[[Point], float]) -> float:
        """Returns a cost at this number of workers, interpolated between the points."""
        if workers in self.points:
            return cost(self.points[workers])
        seen = sorted(self.points)
        below = bisect.bisect(seen, workers)
        low = seen[max(0, below - 1)]
        if not below or len(seen) == 1:
            return cost(self.points[low])
        if low < seen[-1]:
            high = seen[below]
            share = (workers - low) / (high - low)
            return (1 - share) * cost(self.points[low]) + share * cost(self.points[high])
        before = seen[-2]
        slope = max(0.0, (cost(self.points[low]) - cost(self.points[before])) / (low - before))
        return cost(self.points[low]) + slope * (workers - low)

    def curves(self, workers: ndarray) -> tuple[ndarray, ndarray]:
        """Returns `busy_s` and `cpu_s` of many numbers of workers at once, which is far faster."""
        points = sorted(self.points.items())
        seen = np.array([count for count, _ in points])
        low = np.maximum(0, np.searchsorted(seen, workers, side="right") - 1)
        high = np.minimum(low + 1, len(seen) - 1)
        share = (workers - seen[low]) / np.maximum(1, seen[high] - seen[low])
        share = np.where(workers < seen[0], 0.0, share)

        def curve(costs: ndarray) -> ndarray:
            slope = 0.0
            if len(seen) > 1:
                slope = max(0.0, (costs[-1] - costs[-2]) / (seen[-1] - seen[-2]))
            beyond = costs[-1] + slope * (workers - seen[-1])
            inside = (1 - share) * costs[low] + share * costs[high]
            return np.asarray(np.where(workers > seen[-1], beyond, inside))

        return (
            curve(np.array([point.busy_s for _, point in points])),
            curve(np.array([point.cpu_s for _, point in points])),
        )

    def capacity(self, workers: int) -> float:
        """Returns the expected rows a second of `workers` that never wait for input, output or a core."""
        return workers / self.busy_s(workers)

    def unbent(self, workers: int) -> StageCost:
        """Returns the most favourable cost for so many workers: a row gets no dearer above the nearest point below."""
        below = max((n for n in self.points if n <= workers), default=min(self.points))
        return replace(self, points={below: self.points[below]})

    def hopes(self, cores: float, worth: float) -> dict[int, float]:
        """Returns the untried numbers of workers that may bring more, with the rows a second that each could reach.

        `worth` is the ratio by which a rate must rise to be worth a try. A capacity curve has one peak, and perhaps a
        kink before it. So a better number is next to the best one seen, or below it. Between two points, costs grow
        evenly by ratio, or with a kink that may be larger if the points are further apart. Fewer workers than ever seen
        are worth a try if workers may disturb each other."""
        seen = sorted(self.points)
        flat = 1 - self.settings.negligible_share
        top = max(map(self.capacity, seen))
        good = [n for n in seen if self.capacity(n) >= flat * top]
        # The largest of several equally good numbers counts as the best, so that noise does not choose.
        lean, best = good[0], good[-1]
        target = worth * self.capacity(best)
        hopes: dict[int, float] = {}
        for few, many in itertools.pairwise(seen[: seen.index(best) + 2]):
            # No number between two is likely to bring more if both bring the same. That also holds below the best
            # number if costs rise little between the two.
            if flat < self.capacity(few) / self.capacity(many) < 1 / flat or (
                many < best and self.busy_s(many) < self.settings.leap_ratio * self.busy_s(few)
            ):
                continue
            # With fewer workers than this, not even the best curve would bring more.
            least = max(few + 1, math.ceil(target / self.capacity(few) * few))
            count = between(least - 1, many)
            while count > least and self._capacity_with_kink(few, many, count) < target:
                count = between(least - 1, count)
            if count >= many:
                continue
            hopes[count] = min(
                self.unbent(count).capacity(count), self._capacity_with_kink(few, many, count)
            )
            if hopes[count] < target and self._has_edge(seen, few, many):
                del hopes[count]
                count = max(least, between(few, many))
                hopes[count] = self.unbent(few).capacity(count)
        if lean == seen[0] > 1 and (
            self.waiting(lean) > self.settings.mostly_share or lean > cores
        ):
            hopes[lean // 2] = worth**2 * self.capacity(lean)
        return hopes

    def _has_edge(self, seen: list[int], few: int, many: int) -> bool:
        """Returns whether costs rise far more steeply between two numbers of workers than below them.

        Then there is an edge between the two, and more workers help up to that edge."""

        def slope(low: int, high: int) -> float:
            return math.log(self.busy_s(high) / self.busy_s(low)) / math.log(high / low)

        below = [n for n in seen if n < few]
        return slope(few, many) - (max(0.0, slope(below[-1], few)) if below else 0.0) >= 1

    def _capacity_with_kink(self, few: int, many: int, workers: int) -> float:
        """Returns the capacity between two numbers of workers if costs grow evenly by ratio, except for a kink."""
        power = math.log(self.busy_s(many) / self.busy_s(few)) / math.log(many / few)
        return math.sqrt(many / few) * workers / (self.busy_s(few) * math.pow(workers / few, power))

    def waiting(self, workers: int) -> float:
        """Returns the share of useful time spent waiting for a store. 1: latency-bound. 0: processor-bound."""
        point = self._nearest(workers)
        return point.wait_s / point.busy_s

    def describe(self, workers: int) -> dict[str, float]:
        """Returns the cost with `workers` in numbers, for the log."""
        point = self._nearest(workers)
        return {
            "workers": workers,
            "busy_us_a_row": 1e6 * self.busy_s(workers),
            "cpu_us_a_row": 1e6 * point.cpu_s,
            "spread": math.sqrt(point.variance),
            "residual": self.residual,
            "age": self.age,
            "item_bytes": self.item_bytes,
        }


def _plain(points: Mapping[int, Point]) -> dict[str, Any]:
    return {str(workers): asdict(point) for workers, point in points.items()}


def _points(values: Mapping[str, Any]) -> dict[int, Point]:
    return {int(workers): Point(**point) for workers, point in values.items()}
