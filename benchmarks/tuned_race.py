"""Races loaders where there is something to tune, live: Sluice's agent beside defaults and the best of each grid.

    python -m benchmarks.tuned_race --short --lanes python     one lane in short turns
    python -m benchmarks.tuned_race --lanes far,small          two lanes, three rounds
    python -m benchmarks.tuned_race                            everything, for a quiet machine

First each loader tries its settings, as a person would. Then its default and its best setting take turns with Sluice's
`auto`, each turn in a process of its own. Rows/s count from the first batch to the end. A loader that is not installed
is named. In the lane `small`, each loader may use 1.3 times the memory that it needs with one worker.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from deltalake import convert_to_deltalake

from benchmarks.kills import make_data
from benchmarks.peers.far_store import KEYS, FarStore
from benchmarks.peers.functions import passes_of
from benchmarks.peers.memory import Memory
from benchmarks.peers.peer import BY_HAND, OURS, PEERS, Kind, Peer, PeerError, installed
from benchmarks.peers.serve import Job, Turn
from benchmarks.race import Screen
from benchmarks.results import median_ratio, table
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.common.suggest import nearest
from sluice.ingest.machine import Machine

BATCH_ROWS, GROUP_ROWS, STEP_S, ROOM = 4096, 8192, 0.025, 1.3
TABLE = "bucket/table"
FLOATS, IDS = (*(f"d{n}" for n in range(13)), "label"), tuple(f"s{n}" for n in range(26))
ONE_WORKER = {
    OURS.name: "one worker a stage",
    BY_HAND.name: "1 worker",
    "tf.data": "1 readers, 1 for the transform",
    "SPDL": "1 readers, 1 threads for the transform",
    "Ray Data": "prefetch 1",
    "Hugging Face datasets": "Parquet streamed, 0 workers",
    "Grain": "2 threads, 8 row groups ahead",
}
"""The loaders of this race, each with its setting of one worker."""
KINDS = tuple(kind for kind in (OURS, BY_HAND, *PEERS) if kind.name in ONE_WORKER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    about: str
    function: str = "log1p"
    is_far: bool = False
    is_limited: bool = False
    changes: bool = False
    trains: bool = False


LANES = {
    "plain": Lane(about="nothing but a logarithm"),
    "python": Lane(about="20 µs a row of pure Python over texts", function="walk"),
    "numpy": Lane(about="0.5 µs a row of numpy", function="bucket"),
    "far": Lane(about="a store of 50 ms and 20 MB/s a request", is_far=True),
    "small": Lane(about="numpy in little memory", function="bucket", is_limited=True),
    "change": Lane(
        about="numpy costs three times as much, then half of the cores are gone",
        function="bucket",
        changes=True,
    ),
    "model": Lane(about="a trainer of 25 ms a step", trains=True),
}
TUNABLE = ("python", "numpy", "far", "small", "change")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in seconds."""

    survey: float
    turn: float
    change: float
    rounds: int


FULL = Pace(survey=4.0, turn=30.0, change=20.0, rounds=3)
SHORT = Pace(survey=1.5, turn=12.0, change=5.0, rounds=1)


@dataclass(slots=True)
class Entry:
    """A loader at one setting in one lane. A turn that brought nothing is a rate of 0."""

    loader: str
    setting: str
    tried: int
    """The settings that a person had to try for this one."""
    rates: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    peak_mib: int = 0
    killed: int = 0
    note: str = ""

    def add(self, turn: Turn | str, memory: Memory) -> None:
        self.peak_mib = max(self.peak_mib, memory.peak // 2**20)
        self.killed += memory.killed
        if isinstance(turn, str):
            self.note = turn
        self.rates.append(0.0 if isinstance(turn, str) else turn.rows_per_s)
        self.waiting.append(1.0 if isinstance(turn, str) else turn.waiting)

    def row(self, ours: Entry) -> dict[str, Any]:
        """A line of the table; the ratio is that of the rounds' ratios in the middle."""
        whole = ours.rates and self.rates and min(self.rates) > 0
        return {
            "loader": self.loader,
            "setting": self.setting,
            "rows/s": round(statistics.median(self.rates)) if self.rates else 0,
            "waiting": f"{statistics.median(self.waiting):.0%}" if self.waiting else "",
            "peak MiB": self.peak_mib,
            "killed": f"{self.killed} of {len(self.rates)}",
            "settings tried": self.tried,
            "auto ÷ it": median_ratio(ours.rates, self.rates) if whole else "",
            "note": self.note,
        }


def outcome(peer: Peer, setting: str, seconds: float) -> Turn | str:
    """One turn; what went wrong, if it brought nothing."""
    try:
        return peer.turn(setting, seconds)
    except PeerError as error:
        return str(error)


def make_table(folder: Path, rows: int = 131_072) -> None:
    """Writes the files, with a Delta log beside them."""
    make_data(str(folder / TABLE), rows, GROUP_ROWS)
    convert_to_deltalake(str(folder / TABLE))


class TunedRace:
    """The lanes, over files of one folder."""

    def __init__(self, folder: Path, store: str, pace: Pace, screen: Screen) -> None:
        self._folder, self._store, self._pace, self._screen = folder, store, pace, screen
        self._numbers, self._passes = count(), passes_of(STEP_S)
        self.versions: dict[str, str] = {}

    def job(self, lane: Lane) -> Job:
        """A fresh one: a turn leaves the mark of its change in its folder."""
        own = self._folder / f"turn-{next(self._numbers)}"
        own.mkdir()
        files = sorted((self._folder / TABLE).glob("*.parquet"))
        return Job(
            tuple(f"{TABLE}/{file.name}" if lane.is_far else str(file) for file in files),
            FLOATS,
            IDS,
            BATCH_ROWS,
            str(own),
            function=lane.function,
            texts="query" if lane.function == "walk" else "",
            store=self._store if lane.is_far else "",
            step_passes=self._passes if lane.trains else 0,
            change_s=self._pace.change if lane.changes else 0.0,
            convert=False,
        )

    def measure(
        self, kind: Kind, lane: Lane, setting: str, seconds: float, limit: int = 0
    ) -> tuple[Turn | str, Memory]:
        """One turn in a process of its own."""
        self._screen.trying(f"{kind.name}: {setting}, {seconds:g} s")
        memory = Memory(limit)
        try:
            with closing(Peer.start(kind, self.job(lane), memory=memory, patience_s=60)) as peer:
                self.versions = {**peer.versions, **self.versions}
                return outcome(peer, setting, seconds), memory
        except PeerError as error:
            return str(error), memory

    def entries(self, kind: Kind, lane: Lane) -> tuple[list[Entry], int]:
        """A loader's default and the best of its settings, with the memory that it may use."""
        limit = 0
        if lane.is_limited:
            _, memory = self.measure(kind, lane, ONE_WORKER[kind.name], self._pace.survey)
            limit = int(ROOM * memory.peak)
        try:
            default, rates = self.survey(kind, lane, limit)
        except PeerError as error:
            return [Entry(kind.name, "", 0, note=str(error))], 0
        best = max(rates, key=lambda setting: rates[setting])
        entries = [Entry(kind.name, default, 0), Entry(kind.name, best, len(rates))]
        return entries[: 1 + (best != default)], limit

    def survey(self, kind: Kind, lane: Lane, limit: int) -> tuple[str, dict[str, float]]:
        """A loader's default, and the rate of each setting. Where memory is limited, each has a process of its own."""
        rates, seconds = {}, self._pace.survey
        with closing(Peer.start(kind, self.job(lane))) as peer:
            for setting in peer.arms[kind is OURS :]:
                self._screen.trying(f"{kind.name} tries {setting}")
                if limit:
                    turn, _ = self.measure(kind, lane, setting, seconds, limit)
                else:
                    turn = outcome(peer, setting, seconds)
                rates[setting] = turn.rows_per_s if isinstance(turn, Turn) else 0.0
            return peer.arms[0], rates

    def run(self, lane: Lane, kinds: Sequence[Kind]) -> list[dict[str, Any]]:
        """The rows of a lane's table, that of Sluice's `auto` first."""
        started = [(kind, *self.entries(kind, lane)) for kind in kinds]
        arms = [
            (kind, entry, limit)
            for kind, entries, limit in started
            for entry in entries
            if not entry.note
        ]
        seconds = 3 * self._pace.change if lane.changes else self._pace.turn
        for number in range(self._pace.rounds):
            for kind, entry, limit in arms[number % len(arms) :] + arms[: number % len(arms)]:
                entry.add(*self.measure(kind, lane, entry.setting, seconds, limit))
                say(f"  {entry.loader}, {entry.setting}: {entry.rates[-1]:,.0f} rows/s")
        ours = started[0][1][0]
        return [entry.row(ours) for _, entries, _ in started for entry in entries]


def means(lanes: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """By loader, and by its default and its best setting: the geometric mean of `auto` over it in the lanes where there
    is something to tune, the least over all lanes, and the kills. A turn that was killed is in no ratio."""
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    kills: dict[tuple[str, str], int] = {}
    for lane, rows in lanes.items():
        for loader in dict.fromkeys(row["loader"] for row in rows):
            mine = [row for row in rows if row["loader"] == loader]
            for name, row in (("default", mine[0]), ("best of its grid", mine[-1])):
                at = ratios.setdefault((loader, name), {})
                kills[loader, name] = kills.get((loader, name), 0) + int(row["killed"].split()[0])
                if row["auto ÷ it"]:
                    at[lane] = row["auto ÷ it"]
    return [
        {
            "loader": loader,
            "setting": name,
            "geometric mean": statistics.geometric_mean(tuned) if tuned else "",
            "of the lanes": ", ".join(lane for lane in TUNABLE if lane in by_lane),
            "least of any lane": min(by_lane.values(), default=""),
            "killed": kills[loader, name],
        }
        for (loader, name), by_lane in ratios.items()
        for tuned in [[by_lane[lane] for lane in TUNABLE if lane in by_lane]]
    ]


def lanes_of(texts: Sequence[str]) -> list[str]:
    """The lanes of `--lanes`, in the order of the race."""
    wanted = [name for text in texts for name in text.split(",") if name]
    for name in wanted:
        if name not in LANES:
            raise UsageError(
                f"--lanes: there is no lane {name!r}{nearest(name, LANES)}: {', '.join(LANES)}"
            )
    return [name for name in LANES if name in wanted or not wanted]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tuned_race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--lanes", action="append", default=[], help=f"of {', '.join(LANES)} (default: all)")
    add("--only", action="append", default=[], metavar="LOADER", help="beside Sluice; again: more")
    add("--short", action="store_true", help="one round of short turns")
    add("--output", type=Path, help="a JSON file for the result")
    options = parser.parse_args(argv)
    names, pace = lanes_of(options.lanes), SHORT if options.short else FULL
    kinds = installed(KINDS, [OURS.name, *options.only] if options.only else [])
    os.environ.update(KEYS)
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_table(Path(folder))
        with FarStore(Path(folder)) as store:
            race = TunedRace(Path(folder), store.address, pace, Screen())
            for name in names:
                say(f"\n{name}: {LANES[name].about}")
                results[name] = race.run(LANES[name], kinds)
                say(table(results[name]))
    result = {
        "date": f"{datetime.date.today()}",
        "processor": Machine().model(),
        "cores": Machine().cores(),
        "versions": race.versions,
        "not installed": [kind.name for kind in KINDS if not kind.python.exists()],
        "short": options.short,
        "lanes": results,
        "means": means(results),
    }
    say(f"\n{table(result['means'])}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False))
    return result


if __name__ == "__main__":
    run(main)
