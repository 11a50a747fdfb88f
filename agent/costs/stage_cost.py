"""What one stage costs, learned from snapshots while it runs: `StageCost`. Pure: each observation makes a new one.

The model is the useful time a row at each number of workers that was seen. Useful time does not include waits for
neighbours and for cores, so an idle stage teaches as much as the bottleneck does.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.ingest.stats import StageStats


def between(few: int, many: int) -> int:
    """The number half-way between two numbers of workers, by ratio; `few` itself if there is nothing between."""
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
        return max(0.0, self.busy_s - self.cpu_s)

    def towards(self, busy_s: float, cpu_s: float, learning: float) -> Point:
        weight = max(learning, 1 / (self.seen + 1))
        error = busy_s / self.busy_s - 1
        return Point(
            busy_s=self.busy_s + weight * (busy_s - self.busy_s),
            cpu_s=self.cpu_s + weight * (cpu_s - self.cpu_s),
            variance=(1 - weight) * (self.variance + weight * error * error),
            seen=self.seen + 1,
        )

    def scaled(self, busy: float, cpu: float) -> Point:
        return replace(self, busy_s=self.busy_s * busy, cpu_s=self.cpu_s * cpu, seen=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage as it was seen so far."""

    name: str
    points: Mapping[int, Point] = field(default_factory=dict)
    """Number of workers → cost of a row. Empty: the stage has not reported yet, and nothing is planned for it."""
    item_bytes: float = 0.0
    """Bytes of an item, from the larger ones seen: what a worker holds while it works."""
    item_rows: float = 0.0
    """Rows of an item lately."""
    process_bytes: int = 0
    """Memory of a worker's process, as measured; 0: none has worked yet."""
    drifts: int = 0
    """How many times the workload was seen to change."""
    leaps: int = 0
    """How many times so much, with as many workers as before, that no change of ours explains it."""
    trends: int = 0
    """How many times as much as that came about little by little."""
    residual: float = 0.0
    """How far expected costs lately were off from observed ones, as a share. Only settings not seen before count."""
    age: int = 0
    """Snapshots since the model last learned. Large: the stage idles, or hardly moves."""
    backend: str = ""
    other_backends: Mapping[str, Mapping[int, Point]] = field(default_factory=dict)
    """The points of back ends that the stage has left."""
    settings: PlannerSettings = DEFAULT
    _anchor: StageStats | None = None  # counters where the present observation began
    _surprise: float = 0.0  # added up; above 0 for a dearer row, below for a cheaper
    _settled: tuple[int, Point] | None = (
        None  # the present point when the others were last moved along with it
    )
    _moved: float = (
        0.0  # how far they were moved since this was last called a trend, as a logarithm
    )

    def observe(self, latest: StageStats, saturated: bool, starting: bool = False) -> StageCost:
        """Learns from one more snapshot of the stage. `saturated` says that no core was free: where waits for a core
        are not counted, part of what looks like useful time was such a wait. While processes are `starting` somewhere,
        stages are starved or blocked, and what they cost then says little."""
        if latest.process_bytes > self.process_bytes:
            return replace(self, process_bytes=latest.process_bytes).observe(
                latest, saturated, starting
            )
        earlier = self._anchor
        if latest.backend != self.backend:
            left = (
                {**self.other_backends, self.backend: self.points}
                if self.points
                else self.other_backends
            )
            return replace(
                self,
                backend=latest.backend,
                points=left.get(latest.backend, {}),
                _anchor=latest,
                _surprise=0.0,
                _settled=None,
                other_backends={b: points for b, points in left.items() if b != latest.backend},
            )
        if (
            starting
            or earlier is None
            or earlier.workers != latest.workers
            or latest.items < earlier.items
        ):
            return replace(
                self, _anchor=latest
            )  # work begun before a resize belongs to neither setting
        items, rows = latest.items - earlier.items, latest.rows - earlier.rows
        core_wait_s, cpu_s = latest.core_wait_s - earlier.core_wait_s, latest.cpu_s - earlier.cpu_s
        busy_s = max(
            latest.busy_s - earlier.busy_s - core_wait_s, min(cpu_s, latest.busy_s - earlier.busy_s)
        )
        if (
            items < self.settings.min_items
            or rows <= 0
            or busy_s <= 0
            or min(cpu_s, core_wait_s) < 0
        ):
            return replace(self, age=self.age + 1)
        item_bytes = max(
            self.settings.forget_factor * self.item_bytes, (latest.bytes - earlier.bytes) / items
        )
        seen = replace(
            self,
            _anchor=latest,
            item_bytes=item_bytes,
            item_rows=rows / items,
            age=0,
            _surprise=0.0,
        )
        busy_s, cpu_s = busy_s / rows, cpu_s / rows
        if saturated and not core_wait_s and self.points:
            busy_s = min(busy_s, max(cpu_s + self._nearest(latest.workers).wait_s, cpu_s))
        return seen._learn(latest.workers, Point(busy_s=busy_s, cpu_s=cpu_s), self._surprise)

    def _learn(self, workers: int, found: Point, surprise: float) -> StageCost:
        busy_s, cpu_s = found.busy_s, found.cpu_s
        known = self.points.get(workers)
        ratio = busy_s / self.busy_s(workers) if self.points else 1.0
        residual = self.residual + self.settings.learning_weight * (
            min(abs(ratio - 1), 1.0) - self.residual
        )
        if known is None or not known.seen:
            return replace(self, residual=residual, points={**self.points, workers: found})
        if 1 / self.settings.drift_ratio < ratio < self.settings.drift_ratio:
            nearer = known.towards(busy_s, cpu_s, self.settings.learning_weight)
            return replace(self, residual=residual, points={**self.points, workers: nearer})._along(
                workers, known
            )
        step = math.copysign(
            min(abs(math.log(ratio)), self.settings.drift_clip) - self.settings.drift_slack,
            ratio - 1,
        )
        surprise = step if surprise * step < 0 else surprise + step
        if abs(surprise) < self.settings.drift_alarm:
            return replace(self, residual=residual, _surprise=surprise)
        # The curve keeps its shape, as the contention that bent it is still there.
        cpu_ratio = cpu_s / known.cpu_s if known.cpu_s > 0 else 1.0
        return replace(
            self,
            drifts=self.drifts + 1,
            leaps=self.leaps + (ratio >= self.settings.leap_ratio),
            residual=residual,
            other_backends={},
            _settled=None,
            points={n: point.scaled(ratio, cpu_ratio) for n, point in self.points.items()},
        )

    @property
    def doubtful(self) -> bool:
        """Whether a row was far dearer at the last look, so that one or two more tell whether it stays so."""
        return self._surprise >= self.settings.drift_clip - self.settings.drift_slack

    def _along(self, workers: int, known: Point) -> StageCost:
        """Moves the whole curve along with its present point once that has drifted far, as the others were seen
        earlier. `known` is the point before the latest observation."""
        now, (count, then) = self.points[workers], self._settled or (0, known)
        if known.seen < self.settings.settled_observations:
            return self
        if count != workers:
            return replace(self, _settled=(workers, known))._along(workers, known)
        busy, cpu = now.busy_s / then.busy_s, now.cpu_s / then.cpu_s if then.cpu_s > 0 else 1.0
        by_chance = math.sqrt(self.settings.learning_weight * now.variance)
        if abs(math.log(busy)) < self.settings.trend_change + by_chance:
            return self
        points = {
            n: replace(p, busy_s=p.busy_s * busy, cpu_s=p.cpu_s * cpu)
            for n, p in self.points.items()
        }
        moved = self._moved + math.log(busy)
        trend = abs(moved) >= math.log(self.settings.drift_ratio)
        return replace(
            self,
            points={**points, workers: now},
            _settled=(workers, now),
            trends=self.trends + trend,
            _moved=0.0 if trend else moved,
        )

    def to_dict(self) -> dict[str, Any]:
        """What was learned, for JSON, without the unfinished observation."""
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
        """The stage as expected on another back end: as seen there, or else as with its fewest workers here, which
        hardly disturb each other."""
        least = min(self.points)
        points = self.other_backends.get(backend) or {least: self.points[least]}
        return replace(self, backend=backend, points=points)

    @property
    def anywhere(self) -> StageCost:
        """The stage as far as anything is known of it: on another back end, if it was not seen on this one yet."""
        return (
            self
            if self.points
            else replace(self, points=next(iter(self.other_backends.values()), {}))
        )

    def joined(self, other: StageCost) -> StageCost:
        """Two stages as one, whose workers do the work of both."""
        counts = {*self.points, *other.points}
        return replace(
            self,
            item_bytes=max(self.item_bytes, other.item_bytes),
            points={
                n: Point(
                    busy_s=self.busy_s(n) + other.busy_s(n), cpu_s=self.cpu_s(n) + other.cpu_s(n)
                )
                for n in counts
            },
        )

    def relieved(self) -> StageCost:
        """The stage if its workers no longer disturbed each other, as a stage that held the same lock has moved
        away."""
        most = self.settings.relieved_ratio * self.points[min(self.points)].busy_s
        return replace(self, points={n: p for n, p in self.points.items() if p.busy_s <= most})

    def known_well(self, workers: int) -> StageCost:
        """The stage without what was tried for a moment only, perhaps while costs were changing already. The present
        setting and the smallest are kept."""
        return replace(
            self,
            points={
                n: p
                for n, p in self.points.items()
                if n in (workers, min(self.points)) or p.seen > self.settings.patience_ticks
            },
        )

    def stale(self) -> StageCost:
        """The same model, but the next observation at a setting replaces all earlier ones."""
        return replace(self, points={n: replace(p, seen=0) for n, p in self.points.items()})

    def unhindered(self) -> StageCost:
        """The stage if it hardly waited, neither for a lock nor for a store."""
        return replace(
            self,
            points={
                n: replace(p, busy_s=max(p.cpu_s, self.settings.min_wait_share * p.busy_s))
                for n, p in self.points.items()
            },
        )

    @property
    def locked(self) -> bool:
        """Whether the workers wait for each other: more of them made a row dearer, and the added time is waiting."""
        least = self.points[min(self.points)]
        return any(
            p.busy_s >= self.settings.locked_ratio * least.busy_s
            and p.wait_s - least.wait_s >= self.settings.mostly_share * (p.busy_s - least.busy_s)
            for p in self.points.values()
        )

    def _nearest(self, workers: int) -> Point:
        return self.points[min(self.points, key=lambda n: (abs(n - workers), n))]

    @property
    def most_seen(self) -> int:
        return max(self.points, default=0)

    def cpu_s(self, workers: int) -> float:
        """The expected processor seconds a row with `workers`, interpolated as in `busy_s`."""
        return self._between(workers, lambda point: point.cpu_s)

    def busy_s(self, workers: int) -> float:
        """The useful seconds a row that a worker is expected to need when there are `workers`.

        Between two settings seen, the value lies on the line between them. Above all settings it follows the last
        slope, the curve of a stage part of which cannot run in parallel. Below all it is that of the smallest seen."""
        return self._between(workers, lambda point: point.busy_s)

    def _between(self, workers: int, cost: Callable[[Point], float]) -> float:
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

    def capacity(self, workers: int) -> float:
        """The rows a second that `workers` are expected to do with enough input, room for output, and free cores."""
        return workers / self.busy_s(workers)

    def unbent(self, workers: int) -> StageCost:
        """The best that so many workers could be: as if the curve did not bend after the last setting seen below."""
        below = max((n for n in self.points if n <= workers), default=min(self.points))
        return replace(self, points={below: self.points[below]})

    def hopes(self, cores: float, worth: float) -> dict[int, float]:
        """Numbers of workers not seen yet that may bring more than any seen, and the rates that they could reach.

        A curve has one peak, and perhaps a kink before it, so a better setting is next to the best one seen, or below
        it. Between two settings costs grow evenly by ratio, or with a kink that may be larger the further they are
        apart. Fewer workers than ever seen are `worth` a try where workers may be in each other's way."""
        seen = sorted(self.points)
        top = max(
            map(self.capacity, seen)
        )  # of several as good as each other the largest: not whichever chance says
        good = [n for n in seen if self.capacity(n) >= self.settings.flat_share * top]
        lean, best = good[0], good[-1]
        at = seen.index(best)
        hopes: dict[int, float] = {}
        for few, many in itertools.pairwise(seen[: at + 2]):
            if self.settings.flat_share < self.capacity(few) / self.capacity(
                many
            ) < 1 / self.settings.flat_share or (
                many < best and self.busy_s(many) < self.settings.steep_ratio * self.busy_s(few)
            ):
                continue
            # With fewer workers than this, not even the best curve would bring more.
            least = max(few + 1, math.ceil(worth * self.capacity(best) / self.capacity(few) * few))
            count = between(least - 1, many)
            while count > least and self._kinked(few, many, count) < worth * self.capacity(best):
                count = between(least - 1, count)
            if count >= many:
                continue
            hopes[count] = min(self.unbent(count).capacity(count), self._kinked(few, many, count))
            if hopes[count] < worth * self.capacity(best) and self._breaks(seen, few, many):
                del hopes[count]
                count = max(least, between(few, many))
                hopes[count] = self.unbent(few).capacity(count)
        if lean == seen[0] > 1 and (
            self.waiting(lean) > self.settings.mostly_share or lean > cores
        ):
            hopes[lean // 2] = worth**2 * self.capacity(lean)
        return hopes

    def _breaks(self, seen: list[int], few: int, many: int) -> bool:
        """Whether costs between two settings rise so much more steeply than below them that this is no bend: somewhere
        between there is an edge, up to which more workers bring more."""

        def slope(low: int, high: int) -> float:
            return math.log(self.busy_s(high) / self.busy_s(low)) / math.log(high / low)

        below = [n for n in seen if n < few]
        return (
            slope(few, many) - (max(0.0, slope(below[-1], few)) if below else 0.0)
            >= self.settings.edge_power
        )

    def _kinked(self, few: int, many: int, workers: int) -> float:
        """The capacity between two settings if costs grow evenly by ratio, except for a kink."""
        power = math.log(self.busy_s(many) / self.busy_s(few)) / math.log(many / few)
        return math.sqrt(many / few) * workers / (self.busy_s(few) * math.pow(workers / few, power))

    def waiting(self, workers: int) -> float:
        """The share of useful time that is spent waiting for a store. 1: latency-bound; 0: processor-bound."""
        point = self._nearest(workers)
        return point.wait_s / point.busy_s

    def describe(self, workers: int) -> dict[str, float]:
        """The model in numbers, for the log."""
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
