"""Races loaders over the same rows and draws the result live: no Java, no Spark, about a minute.

    python -m benchmarks.race                 # ours, a torch DataLoader, binary files mapped into memory
    python -m benchmarks.race --full          # and every peer that `make bench-peers` has installed
    python -m benchmarks.race --only tf.data --only SPDL --rounds 5
    python -m benchmarks.race --before ../sluice-0.3 --rounds 20   # and the loader of another checkout

Every loader gives the same: batches of 8,192 shuffled rows as tensors, 13 float32 features of which the logarithm is
taken, 26 int32 ids and a label; each in its best form, at the best of a few settings, which is looked for first. Then
it takes turns with ours. The line across the bars is what the decoder alone does
on these files: no loader that reads them can pass it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.loaders import decode_only, made_table
from benchmarks.peers.peer import BY_HAND, OURS, PEERS, Kind, Peer, PeerError, installed
from benchmarks.peers.serve import Job, Turn, turn
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.etl.table.table import FeatureTable
from sluice.ingest.columns import Columns

BATCH_SIZE = 8192
MAPPED = "mapped binary files"
BEFORE = "the other checkout"
_TRIED_S = 1.0  # of each setting, when the best is looked for
_LABEL = 35
_LINE = 0.8  # of the bar's width
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = {"ours": "\033[1;32m", "limit": "\033[33m", "dim": "\033[2m"}
Measure = Callable[[float], Turn]
"""Takes seconds."""


@dataclass(slots=True)
class Lane:
    """One loader's turns, beside ours and the decoder's in the same rounds."""

    name: str
    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Ours over it, round by round."""
    note: str = ""
    row_ns: list[float] = field(default_factory=list)
    """The nanoseconds of processor time of a row."""

    def add(self, turn: Turn) -> None:
        self.rates.append(turn.rows_per_s)
        self.row_ns.append(turn.row_ns)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def core_s(self) -> float:
        """The seconds of processor time of a million rows."""
        return statistics.median(self.row_ns) / 1e3


def bar(rate: float, limit: float, width: int) -> str:
    """As long as `rate` of a little more than `limit`, at which there is a line. An arrow: it goes on."""
    eighths, line = int(rate / limit * _LINE * width * 8), int(_LINE * width)
    cells = [_EIGHTHS[max(0, min(8, eighths - 8 * n))] for n in range(width)]
    cells[line] = "│"
    if eighths >= 8 * width:
        cells[-1] = "▶"
    return "".join(cells)


def drawn(lane: Lane, limit: float, width: int, colours: Mapping[str, str]) -> str:
    """A lane as one line."""
    room = max(10, width - _LABEL - 52)
    ratio = f"ours ×{statistics.median(lane.ratios):.3g}" if lane.ratios else ""
    colour = colours.get("ours" if lane.name.startswith("ours") else "", "")
    end = "\033[0m" if colours else ""
    line = bar(lane.rate, limit, room).replace("│", f"{colours.get('limit', '')}│{end}{colour}")
    return (
        f"{colour}{lane.name:{_LABEL}} {line}{end} {lane.rate / 1e6:7.2f} M rows/s {lane.rate / limit:6.2f} "
        f"{lane.core_s:7.2f} s  {ratio}"
    )


class Screen:
    """One line for each lane; on a terminal, what is being tried comes and goes in the last line."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self.colours = _COLOURS if self._live else {}
        self.width = shutil.get_terminal_size().columns

    def trying(self, what: str) -> None:
        if self._live:
            print(
                f"\r\033[K{_COLOURS['dim']}  … {what[: self.width - 6]}\033[0m",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def line(self, text: str) -> None:
        say(("\r\033[K" if self._live else "") + text)


def mapped_binary(table: FeatureTable, columns: Columns, folder: Path) -> tuple[Measure, str]:
    """Rows shuffled and transformed once and for all, written as two arrays and mapped into memory: what a loader
    costs that has nothing to decode, nor to shuffle but the order of its batches."""
    began = time.perf_counter()
    whole = pq.read_table(
        [f.path for f in table.files_of("train")],
        columns=[*columns.floats, *columns.sparse],
        partitioning=None,
    )
    order, dense = np.random.default_rng(0).permutation(whole.num_rows), len(columns.dense)
    blocks = []
    for name, names, kind in (
        ("floats", columns.floats, np.float32),
        ("ids", columns.sparse, np.int32),
    ):
        block = np.stack([whole[n].to_numpy().astype(kind)[order] for n in names])
        if kind is np.float32:
            np.log1p(block[:dense], out=block[:dense])
        np.save(folder / f"{name}.npy", block)
        blocks.append(np.load(folder / f"{name}.npy", mmap_mode="r"))
    size = sum(block.nbytes for block in blocks)
    spent = time.perf_counter() - began

    def batches() -> Iterator[int]:
        random = np.random.default_rng(0)
        while True:
            for at in random.permutation(whole.num_rows // BATCH_SIZE):
                for block in blocks:
                    torch.from_numpy(block[:, at * BATCH_SIZE : (at + 1) * BATCH_SIZE].copy())
                yield BATCH_SIZE

    return partial(turn, batches), f"made beforehand: {size / 1e6:.0f} MB in {spent:.1f} s"


class Race:
    """Ours and the decoder, and whoever runs beside them."""

    def __init__(
        self, table: FeatureTable, ours: Peer, arguments: argparse.Namespace, screen: Screen
    ):
        self._peer, self._seconds, self._rounds, self._screen = (
            ours,
            arguments.seconds,
            arguments.rounds,
            screen,
        )
        self._decode = decode_only(table, Columns.of(table.fields))
        self.lanes: list[Lane] = []
        self._ours_lane, self._limits = Lane("ours"), [self._decode(self._seconds)]

    @property
    def limit(self) -> float:
        return statistics.median(self._limits)

    def beside(self, name: str, measure: Measure, note: str = "") -> None:
        """Its turns and ours, one after the other; then its line."""
        lane = Lane(name, note=note)
        for number in range(self._rounds):
            self._screen.trying(f"{name}, {note}: round {number + 1} of {self._rounds}")
            lane.add(measure(self._seconds))
            self._ours_lane.add(self._ours(self._seconds))
            lane.ratios.append(self._ours_lane.rates[-1] / lane.rates[-1])
        self._limits.append(self._decode(self._seconds))
        self.lanes.append(lane)
        self._show(lane)

    def alone(self) -> None:
        """Ours first, so that there is something to see, at the best of its settings."""
        tried = self._tried("ours", self._peer)
        self._ours_lane.note = max(tried, key=lambda arm: tried[arm])
        self._ours = partial(self._peer.turn, self._ours_lane.note)
        for _ in range(self._rounds):
            self._ours_lane.add(self._ours(self._seconds))
        self.lanes.append(self._ours_lane)
        self._show(self._ours_lane)

    def _tried(self, name: str, peer: Peer) -> dict[str, float]:
        """The rate of each of its settings."""
        tried = {}
        for arm in peer.arms:
            self._screen.trying(f"{name} tries {arm}")
            tried[arm] = peer.turn(arm, _TRIED_S).rows_per_s
        return tried

    def against(self, kind: Kind, job: Job) -> None:
        """A peer at the best of its settings; one that fails gets a line with what it said."""
        self._screen.trying(f"{kind.name} starts")
        try:
            with closing(Peer.start(kind, job)) as peer:
                tried = self._tried(kind.name, peer)
                apart = {arm for arm in tried if kind.apart and arm.startswith(kind.apart)}
                for name, arms in (
                    (kind.name, tried.keys() - apart),
                    (f"{kind.name}, {kind.apart}", apart),
                ):
                    if arms:
                        best = max(arms, key=lambda arm: tried[arm])
                        note = best + (
                            f"; made beforehand: {peer.prepared_bytes / 1e6:.0f} MB in "
                            f"{peer.prepared_seconds:.1f} s"
                            if peer.prepared_bytes and best.startswith(peer.prepared_for)
                            else ""
                        )
                        self.beside(name, partial(peer.turn, best), note)
        except PeerError as error:
            self._screen.line(f"{kind.name:{_LABEL}} {error}")

    def _show(self, lane: Lane) -> None:
        self._screen.line(drawn(lane, self.limit, self._screen.width, self._screen.colours))

    def result(self) -> dict[str, Any]:
        return {
            "decode_rows_per_s": round(self.limit),
            "rows_per_s": {lane.name: round(lane.rate) for lane in self.lanes},
            "core_s_per_million": {lane.name: round(lane.core_s, 3) for lane in self.lanes},
            "times": {
                lane.name: round(statistics.median(lane.ratios), 2)
                for lane in self.lanes
                if lane.ratios
            },
            "settings": {lane.name: lane.note for lane in self.lanes if lane.note},
        }


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows", type=int, default=1_600_000, help="rows of the table (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of each turn (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each, medians count (default %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="every peer that is installed")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PEER", help="these peers; may be repeated"
    )
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER", help="a checkout with its environment in .venv"
    )
    arguments = parser.parse_args(argv)
    if arguments.seconds <= 0 or arguments.rounds < 1 or arguments.rows < 8 * BATCH_SIZE:
        raise UsageError(
            f"--seconds and --rounds are positive, and --rows at least {8 * BATCH_SIZE}"
        )
    known = (BY_HAND, *PEERS)
    peers = installed(known, arguments.only or ([] if arguments.full else [BY_HAND.name]))
    if before := arguments.before:
        peers = [*peers, replace(OURS, name=BEFORE, environment=".venv", root=before.resolve())]
    screen = Screen()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        table = made_table(Path(folder), arguments.rows)
        columns = Columns.of(table.fields)

        def job() -> Job:
            own = stack.enter_context(tempfile.TemporaryDirectory())
            files = tuple(f.path for f in table.files_of("train"))
            return Job(files, columns.floats, columns.sparse, BATCH_SIZE, own)

        ours = stack.enter_context(closing(Peer.start(OURS, job())))
        race = Race(table, ours, arguments, screen)
        say(
            f"│ is the decoder alone, {race.limit / 1e6:.2f} M rows/s; behind each rate, its share of that, the "
            "processor time of a million rows, and how many times ours is as fast\n"
        )
        race.alone()
        for kind in peers:
            race.against(kind, job())
        if not arguments.only:
            screen.trying("binary files are being made")
            race.beside(MAPPED, *mapped_binary(table, columns, Path(folder)))
        say("\nmedians, the fastest first")
        for lane in sorted(race.lanes, key=lambda lane: -lane.rate):
            say(drawn(lane, race.limit, screen.width, screen.colours))
        for lane in race.lanes:
            if lane.note:
                say(f"  {lane.name}: {lane.note}")
        return race.result()


if __name__ == "__main__":
    run(main)
