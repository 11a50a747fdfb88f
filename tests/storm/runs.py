"""What a seed stands for: `run_seed` draws one of the runs, `run_seeds` many of them, in processes, and adds up."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields

from tests.storm.doors import by_lines, chance_of, storm
from tests.storm.loading import run_loader
from tests.storm.pools import run_pools
from tests.storm.scheduler import Crew, Scheduler
from tests.storm.tables import World as Table
from tests.storm.tables import run_table

_TOGETHER = 200  # seeds that a process does before it tells
_LOADERS = 0.5


@dataclass(frozen=True, kw_only=True)
class Sum:
    """What happened in some runs."""

    seeds: int = 0
    deviations: int = 0
    kills: int = 0
    """Processes that were killed, or hung and were ended for it."""
    resizes: int = 0
    stalls: int = 0
    """Reads that took long, and processes that stood still for a while."""
    errors: int = 0
    """Reads that failed, and were tried again."""
    resumes: int = 0
    conflicts: int = 0
    """Jobs on a table that were overtaken, and told so."""
    steps: int = 0
    switches: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Finding:
    """A seed whose run deviated, and how."""

    seed: int
    text: str


def run_seed(seed: int, crew: Crew, tables: bool = False) -> Scheduler:
    """The whole run of one seed, of the loader or of a table; raises what it finds. Call it within `storm()`."""
    chance = chance_of(seed)
    if tables:
        return run_table(chance, crew, by_lines)
    kind = run_loader if chance.random() < _LOADERS else run_pools
    return kind(chance, crew, by_lines)


def sum_of(run: Scheduler) -> Sum:
    """What happened in a run."""
    counts = dict(seeds=1, steps=run.steps, switches=run.switches)
    if isinstance(run.world, Table):
        counts |= dict(
            kills=run.world.kills, errors=run.world.refused, conflicts=run.world.conflicts
        )
    elif run.world is not None:
        weather, fate = run.world.weather, run.world.fate
        counts |= dict(
            kills=fate.deaths,
            resizes=run.world.resizes,
            resumes=run.world.resumes,
            stalls=weather.stalls + fate.pauses,
            errors=weather.errors,
        )
    return Sum(**counts)


def some_seeds(seeds: Iterable[int], tables: bool = False) -> tuple[Sum, list[Finding]]:
    """In this process."""
    total, findings = Sum(), []
    with storm() as crew:
        for number, seed in enumerate(seeds):
            try:
                total += sum_of(run_seed(seed, crew, tables))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                total += Sum(seeds=1, deviations=1)
                findings.append(Finding(seed, traceback.format_exc()))
            if number % 50 == 49:
                gc.collect()
                gc.freeze()  # the next collection looks only at what the next runs leave, not at every module again
    return total, findings


def run_seeds(
    seeds: range, processes: int, tables: bool = False
) -> Iterator[tuple[Sum, list[Finding]]]:
    """In several processes, part by part as they are done."""
    parts = [seeds[at : at + _TOGETHER] for at in range(0, len(seeds), _TOGETHER)]
    with multiprocessing.get_context("spawn").Pool(processes, _begin) as pool:
        yield from pool.imap_unordered(functools.partial(some_seeds, tables=tables), parts)


def _begin() -> None:
    """One core for each process: its threads run one at a time anyway, and change places much faster on one."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(
        0, {allowed[multiprocessing.current_process()._identity[0] % len(allowed)]}
    )  # type: ignore[attr-defined]


def described(seed: int, tables: bool = False) -> tuple[Scheduler | None, str]:
    """One seed's run, and what it found; for a person."""
    text, Scheduler.latest = "", None
    with storm() as crew:
        try:
            run_seed(seed, crew, tables)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            text = traceback.format_exc()
    return Scheduler.latest, text
