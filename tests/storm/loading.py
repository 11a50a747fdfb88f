"""One run of the real loader in a storm: `Case` is what a seed draws, `run_loader` runs it and compares every batch."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest import mock

from sluice import Errors, Knobs, Order, Reading, Transform
from sluice.ingest import stage_spec
from sluice.ingest.flow import series
from sluice.ingest.stages import row_functions
from tests.product import (
    BatchLoader,
    KnobError,
    LoaderError,
    QuarantineError,
    RowsPlan,
    SourceError,
)
from tests.storm import doors, store, twin
from tests.storm.children import Fate
from tests.storm.functions import FUNCTIONS
from tests.storm.scheduler import Crew, Deviation, Ended, Scheduler, Way
from tests.storm.store import Weather
from tests.storm.threads import Thread, Time, entered

_BASE = 1000  # bytes that the process of a storm holds before it loads
_AMPLE = 10**9
_LIMIT_S = 500.0  # of a process's item: more than all pauses of a run, so that only who hangs is ended for it
_PATIENCE_S = 60.0
_SHAPES = (
    ("one", 1, 3, 2),
    ("one", 2, 4, 5),
    ("many", 2, 4, 8),
    ("many", 4, 4, 3),
    ("bags", 1, 3, 8),
    ("bags", 2, 4, 4),
    ("long", 4, 8, 4),
    ("long", 2, 6, 16),
)
"""Table, streams, batch size, rows of a window."""


@dataclass
class World:
    """What befalls one run from outside."""

    weather: Weather
    fate: Fate
    fed: set[int] = field(default_factory=set)
    """Batches for which there was not enough memory once."""
    resizes: int = 0
    resumes: int = 0


@dataclass(frozen=True)
class Case:
    """What one seed draws before its run begins."""

    table: str
    plan: RowsPlan
    rank: int
    ranks: int
    epochs: int
    over_rows: tuple[str, ...]
    early: bool
    """Functions over rows are called before rows are placed."""
    transforms: tuple[str, ...]
    apart: bool
    limited: bool
    """Processes are under a time limit, so that one that hangs is ended."""
    steps_together: int
    limit: int
    cores: int
    greed: float
    """How much memory the process takes for itself at times, as a part of the limit."""
    pressure: float
    slow: float
    failing: float
    broken: tuple[int, int] | None
    lost: tuple[int, int] | None
    quarantine: bool
    kill: float
    hang: float
    slow_start: float
    late: float
    deaths: int
    turns: int
    """Times that the agent turns the knobs, beside the consumer."""
    close_at: float | None
    """When somebody closes the loader while it is in use."""

    @property
    def ends_early(self) -> bool:
        """The run may end by an error that names its cause."""
        fails = self.broken is not None or not {"fragile", "picky"}.isdisjoint(
            (*self.over_rows, *self.transforms)
        )
        return self.lost is not None or (fails and not self.quarantine)

    @classmethod
    def draw(cls, chance: Random) -> Case:
        name, streams, batch, window = chance.choice(_SHAPES)
        plan = _plan(
            name,
            streams,
            batch,
            window,
            chance.choice(("drop", "pad")),
            chance.randrange(2),
            chance.random() < 0.8,
        )
        ranks = chance.choice((1, 1, *(n for n in range(2, batch + 1) if plan.can_share(n))))
        transforms = tuple(
            chance.sample(("raised", "doubled", "hungry"), chance.choice((0, 0, 1, 1, 2, 3)))
        )
        trouble = chance.random() if chance.random() < 0.15 else 1.0
        quarantine = trouble < 0.6
        if trouble < 0.3:
            transforms = (*transforms, "fragile")
        over_rows = tuple(chance.sample(("shifted",), chance.choice((0, 0, 1))))
        if over_rows and trouble < 0.3:
            over_rows = tuple(chance.sample(("shifted", "picky"), 2))
        group = chance.choice(sorted(twin.TABLES[name].groups))
        least = _least(name, plan, len(transforms), over_rows, ranks)
        limit = chance.choice((least, least, least + least // 8, 2 * least, 6 * least, _AMPLE))
        windy = chance.random() < 0.4
        processes = chance.random() < 0.7
        return cls(
            table=name,
            plan=plan,
            rank=chance.randrange(ranks),
            ranks=ranks,
            epochs=chance.choice((1, 1, 2)),
            over_rows=over_rows,
            early=chance.random() < 0.3,
            transforms=transforms,
            apart=chance.random() < 0.7,
            limited=chance.random() < 0.5,
            steps_together=chance.choice((1, 2, 4)),
            limit=limit,
            cores=chance.choice((1, 2, 4)),
            greed=chance.choice((0.0, 0.0, 0.5, 1.5)),
            pressure=chance.choice((0.0, 0.0, 0.3)),
            slow=chance.choice((0.05, 0.4)) if windy else 0.0,
            failing=chance.choice((0.0, 0.1, 0.4)) if windy else 0.0,
            broken=group if 0.3 <= trouble < 0.8 else None,
            lost=group if 0.8 <= trouble < 1 else None,
            quarantine=quarantine,
            kill=chance.choice((0.0, 0.02, 0.1)) if processes else 0.0,
            hang=chance.choice((0.0, 0.0, 0.02)),
            slow_start=chance.choice((0.0, 0.0, 0.0, 0.5)),
            late=chance.choice((0.0, 0.0, 0.1)),
            deaths=chance.choice((0, 1, 2, 2)),
            turns=chance.choice((0, 1, 4, 12)),
            close_at=chance.random() * 3 if chance.random() < 0.04 else None,
        )

    def knobs(self, chance: Random, limits: Any) -> Knobs:
        """Any that are allowed."""
        most = chance.choice((1, 2, 4))
        workers = {
            name: chance.randint(1, min(most, high)) for name, (_, high) in limits.workers.items()
        }
        backend = {name: chance.choice(kinds) for name, kinds in limits.backends.items()}
        return limits.clamp(
            Knobs(
                workers=workers,
                backend=backend,
                read_ahead_bytes=chance.choice((1, 200, 2000, 2**40)),
                prefetch_bytes=chance.choice((1, 100, 1000, 2**40)),
            )
        )

    def expected(self) -> list[tuple[twin.Expected, ...]]:
        return [
            twin.epoch(
                self.table,
                self.plan,
                number,
                self.rank,
                self.ranks,
                self.over_rows,
                self.transforms,
                self.broken,
            )
            for number in range(self.epochs + 1)
        ]


Bend = Callable[[Case], Case]


@functools.lru_cache(maxsize=256)
def _plan(  # noqa: PLR0917
    name: str,
    streams: int,
    batch: int,
    window: int,
    last: str,
    seed: int,
    shuffle: bool,
) -> RowsPlan:
    groups = tuple(f.row_group_rows for f in twin.TABLES[name].source.files)
    return RowsPlan(
        groups=groups,
        batch_size=batch,
        streams=streams,
        window_rows=window,
        last=last,
        seed=seed,
        shuffle=shuffle,
    )


@functools.lru_cache(maxsize=4096)
def _least(
    name: str, plan: RowsPlan, transforms: int, over_rows: tuple[str, ...], ranks: int
) -> int:
    """Bytes that a run needs at least, by the loader's own reckoning: of every rank and step that a seed may draw."""
    from sluice.ingest.columns import Columns
    from sluice.ingest.flow.number_columns import count_converted
    from sluice.ingest.stages.minimum_memory import footprint_of, held_rows
    from sluice.ingest.stages.row_functions import memory_of

    source = twin.TABLES[name].source
    columns = Columns.of(source.fields, None, source.bags)
    decoding = store.decoding(source.files, columns.names)
    schema = store.TABLES[source.files[0].path][0].schema
    least, functions = 0, tuple(map(_over_rows, over_rows))
    specs = stage_spec.pipeline(
        [stage_spec.transform(f"t{n}", movable=False) for n in range(transforms)],
        rows=[stage_spec.transform(function.name, movable=False) for function in functions],
    )
    for steps in (1, 2, 4):
        _together(plan, ranks, steps)
        for rank in range(ranks):
            with mock.patch.multiple("sluice.ingest.stages.minimum_memory", **doors.FOOTPRINT):
                least = max(
                    least,
                    footprint_of(
                        plan,
                        columns,
                        decoding,
                        share=plan.share_of(rank, ranks),
                        stages=specs,
                        converted=count_converted(schema, columns),
                        epochs=2,
                        functions=memory_of((), functions, decoding, plan, series.SERIES_ROWS),
                        held=decoding.decoded(
                            held_rows(plan, plan.share_of(rank, ranks), 2, columns.row_bytes)
                        )
                        * bool(functions),
                    ).total,
                )
    return least + _BASE


def _over_rows(name: str, limit_s: float | None = None) -> Transform:
    return Transform(
        f"tests.storm.functions:{name}",
        name,
        reads=["x", "a"],
        gives={"x": "float32"},
        limit_s=limit_s,
    )


def _together(plan: RowsPlan, ranks: int, steps: int) -> None:
    """Batches of a series, and of a chunk."""
    series.SERIES_ROWS = plan.batch_size * steps // ranks


class Machine:
    """A machine that has what the case says."""

    def __init__(self, case: Case, run: Scheduler):
        self._case, self._run = case, run

    def cores(self) -> float:
        return float(self._case.cores)

    def memory_limit(self, user: int | None = None) -> int:
        return self._case.limit

    def memory_used(self) -> int:
        return _BASE

    def memory_group(self) -> None:
        """None has a limit."""

    def memory_own(self) -> int:
        """At times something else in the process takes memory, and gives it back."""
        case, chance = self._case, self._run.chance
        taken = (
            int(chance.random() * case.greed * case.limit)
            if case.greed and chance.random() < 0.3
            else 0
        )
        return _BASE + taken

    def memory_pressure(self) -> float:
        return (
            50.0 if self._case.pressure and self._run.chance.random() < self._case.pressure else 0.0
        )

    def cpu_used_s(self) -> float:
        return 0.0

    def cores_idle_s(self) -> None:
        return None


class Consumer:
    """Takes the batches, and does to the loader what a trainer does."""

    def __init__(self, case: Case, run: Scheduler, quarantine: str):
        self._case, self._run, self._quarantine = case, run, quarantine
        self.expected = case.expected()
        self._held: deque[tuple[Any, twin.Expected]] = deque(maxlen=3)
        self._seen: dict[tuple[BatchLoader, int], Any] = {}
        self._loader: BatchLoader = self._open()
        self._closed_by_other = False
        self._ran_out = False
        """The pipeline's last batch has come, by itself."""

    def _open(self) -> BatchLoader:
        case, plan = self._case, self._case.plan
        limit_s = _LIMIT_S if case.limited else None
        over_rows = tuple(_over_rows(name, limit_s) for name in case.over_rows)
        source = replace(twin.TABLES[case.table].source, functions=over_rows)
        transforms = [
            Transform(
                f"tests.storm.functions:{name}"
                if (named := n % 2 == 0 or case.apart)
                else functools.partial(FUNCTIONS[name]),  # stays in threads
                f"{n}-{name}",
                apart=case.apart,
                limit_s=limit_s if named else None,
            )
            for n, name in enumerate(case.transforms)
        ]
        loader = BatchLoader(
            source,
            batch_size=plan.batch_size,
            rank=case.rank,
            ranks=case.ranks,
            seed=plan.seed,
            read_ahead_epochs=case.epochs,
            transforms=[*over_rows, *transforms],
            errors=Errors(
                on_error="quarantine" if case.quarantine else "raise",
                max_rate=1,
                quarantine=self._quarantine,
            ),
            knobs=None,
            machine=Machine(case, self._run),
            order=Order(
                shuffle=plan.shuffle,
                streams=plan.streams,
                window_rows=plan.window_rows,
                last=plan.last,
            ),
            reading=Reading(reader="arrow"),
        )  # type: ignore[arg-type]
        loader.apply(case.knobs(self._run.chance, loader.limits))
        return loader

    def go(self) -> None:
        case, run = self._case, self._run
        helpers = [Thread(target=self._turn, name="agent")]
        if case.close_at is not None:
            helpers.append(Thread(target=self._close, name="closer"))
        for helper in helpers:
            helper.start()
        try:
            self._epochs()
            self._settled()
        except (SourceError, QuarantineError):
            if not case.ends_early:
                raise
        except LoaderError as error:
            if not self._closed_by_other or "closed" not in str(error):
                raise
        finally:
            if run.failure is None:
                self._loader.close()
        for helper in helpers:
            helper.join()
        self._gone(self._loader)

    # ---- taking batches

    def _epochs(self) -> None:
        number = step = 0
        while number < self._case.epochs:
            wanted = self.expected[number]
            for batch in self._loader:
                if (batch.epoch, batch.step) != (number, step):
                    raise Deviation(
                        f"batch {batch.epoch}/{batch.step} where {number}/{step} was due"
                    )
                self._look(batch, wanted[step])
                step += 1
                del batch
                what = self._between()
                self._ran_out = False
                if what == "resume":
                    self._resume()
                    break
                if what == "break" and step < len(wanted):
                    number, step = number + 1, 0
                    break
            else:
                self._whole(number, step, wanted)
                self._ran_out = number + 1 == self._loader._end_epoch
                number, step = number + 1, 0
                continue
            if step == len(wanted):  # resumed behind the last batch of an epoch
                number, step = number + 1, 0

    def _look(self, batch: Any, wanted: twin.Expected) -> None:
        for held, expected in (
            *self._held,
            (batch, wanted),
        ):  # those taken before must stay as they were
            difference = expected.differs(held)
            if difference:
                raise Deviation(
                    f"batch {held.epoch}/{held.step}, looked at with {batch.epoch}/{batch.step}: "
                    f"{difference}"
                )
        if self._run.chance.random() < 0.3:
            self._held.append((batch, wanted))
        elif self._held and self._run.chance.random() < 0.3:
            self._held.popleft()

    def _whole(self, number: int, step: int, wanted: tuple[twin.Expected, ...]) -> None:
        if step != len(wanted):
            raise Deviation(f"epoch {number} ended after {step} of {len(wanted)} batches")
        if self._loader.order_hash != twin.order_hash(wanted):
            raise Deviation(
                f"epoch {number}: order hash {self._loader.order_hash} where the twin has "
                f"{twin.order_hash(wanted)}"
            )

    def _between(self) -> str:
        """What the trainer does with a batch."""
        chance = self._run.chance
        what = chance.random()
        if what < 0.3:
            Time.sleep(chance.random() * 0.05)
        elif what < 0.36:
            self._apply()
        elif what < 0.40:
            self._count()
        elif what < 0.42:
            return "resume"
        elif what < 0.43:
            return "break"
        return ""

    def _resume(self) -> None:
        """From a state, in this loader or in a new one."""
        self._run.world.resumes += 1
        state = self._loader.state_dict()
        if self._run.chance.random() < 0.5 and self._case.close_at is None:
            self._loader.close()
            self._gone(self._loader)
            self._loader = self._open()
        self._loader.load_state_dict(state)

    # ---- what happens beside it

    def _turn(self) -> None:
        for _ in range(self._case.turns):
            Time.sleep(self._run.chance.random() * 0.1)
            what = self._run.chance.random()
            if what < 0.6:
                self._apply()
            elif what < 0.75:
                self._count()
            elif what < 0.95:
                self._run.world.fate.strike()
            else:
                self._loader.pipeline.stacks()

    def _apply(self) -> None:
        loader, limits = self._loader, self._loader.limits
        try:
            loader.apply(self._case.knobs(self._run.chance, limits))
        except KnobError:
            if loader.limits == limits:  # no process has started too slowly in between
                raise
        self._run.world.resizes += 1

    def _count(self) -> None:
        """Counters never fall, as a thread sees them."""
        loader, thread = self._loader, self._run.current.number
        now, before = loader.snapshot(), self._seen.get((loader, thread))
        for stage in now.stages if before is not None else ():
            for name in ("items", "rows", "bytes", "busy_s", "wait_input_s", "wait_output_s"):
                if getattr(stage, name) < getattr(before.stage(stage.name), name):
                    raise Deviation(
                        f"{stage.name}.{name} fell from {getattr(before.stage(stage.name), name)} to "
                        f"{getattr(stage, name)}"
                    )
        self._seen[loader, thread] = now

    def _close(self) -> None:
        Time.sleep(self._case.close_at or 0.0)
        self._closed_by_other = True
        self._loader.close()

    # ---- the account

    def _settled(self) -> None:
        """All that was charged is given back. A read without rows for any batch may still be at work."""
        governor, end = self._loader.pipeline._governor, self._run.now + _PATIENCE_S
        if not self._ran_out:
            return
        while (governor.charged or governor._waiting) and self._run.now < end:
            Time.sleep(0.1)
        if governor.charged or governor._early:
            raise Deviation(
                f"{governor.charged} bytes are still charged behind the last batch, {governor._early} of "
                "them to early work"
            )
        if governor._waiting:
            raise Deviation(f"{len(governor._waiting)} still wait for memory behind the last batch")

    def _gone(self, loader: BatchLoader) -> None:
        """Nothing is left of a loader that was closed."""
        pipeline, end = loader.pipeline, self._run.now + _PATIENCE_S
        while (
            not pipeline.gone and self._run.now < end
        ):  # every step takes time here, so it may be later than promised
            Time.sleep(0.1)
        if not pipeline.gone:
            raise Deviation(
                f"threads are left after the loader was closed:\n{self._run.describe()}"
            )
        if pipeline._governor.held:
            raise Deviation(
                f"{pipeline._governor.held} bytes of processes are still held after the end"
            )
        governor = pipeline._governor
        if (
            getattr(governor, "peak", 0) > governor.limit - governor.base
            and self._case.table != "bags"
        ):
            raise Deviation(
                f"{governor.peak} bytes were charged at a time, of {governor.limit - governor.base}"
            )
        left = [c.name for c in self._run.world.fate.children if not c.closed]
        if left:
            raise Deviation(f"nobody closed {', '.join(left)}")
        deaths = sum(c.code != 0 for c in self._run.world.fate.children)
        if pipeline.restarts > deaths:
            raise Deviation(f"{pipeline.restarts} restarts for {deaths} deaths")


def run_loader(
    chance: Random, crew: Crew, traced: Any, bend: Bend = lambda case: case
) -> Scheduler:
    """One run; raises what it finds. `bend` changes what is drawn."""
    case = bend(Case.draw(chance))
    case.expected()  # outside of the run: the functions of a run are interrupted
    _together(case.plan, case.ranks, case.steps_together)
    run = Scheduler(chance, Way.draw(chance), crew, traced)
    held_part = mock.patch.object(row_functions, "_HELD_PART", 0.0 if case.early else 0.25)
    with entered(run), held_part:
        paths = [f.path for f in twin.TABLES[case.table].source.files]
        at = {
            n: (paths[group[0]], group[1])
            for n, group in (("broken", case.broken), ("lost", case.lost))
            if group is not None
        }
        run.world = World(
            Weather(run, slow=case.slow, failing=case.failing, **at),
            Fate(
                run,
                kill=case.kill,
                hang=case.hang if case.limited else 0.0,
                late=case.late,
                slow_start=case.slow_start,
                most=case.deaths,
            ),
        )
        run.case = case
        try:
            Consumer(case, run, "/dev/null").go()
            run.finish()
        except Ended:
            raise run.failure or Deviation("the run was ended") from None
        finally:
            run.close()
            run.world.fate.bury()
    return run
