"""Holds what all versions of a run share on one rank: signals, journal, endpoint and pinned files."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from sluice.agent.report.run_folder import RunFolder, check_unused
from sluice.dlrm.checkpoint.meta import CheckpointMeta, latest
from sluice.dlrm.follow import versions
from sluice.dlrm.foreign_table import ForeignTable
from sluice.dlrm.liveness.activity import Activity
from sluice.dlrm.liveness.rank_exit import RankExit
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.session.run import TrainingRun, follow
from sluice.dlrm.telemetry.prometheus import Endpoint
from sluice.dlrm.training.signals import StopSignals
from sluice.etl.table.pins import PinKeeper
from sluice.etl.table.table import LostVersion

if TYPE_CHECKING:
    from sluice.dlrm.telemetry.journal import Journal


@dataclass(kw_only=True)
class TrainingSession:
    """A context that is open during a run. Closing it releases the run folder and the table."""

    run: TrainingRun
    ranks: Ranks
    signals: StopSignals
    activity: Activity
    ending: RankExit
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._journal: Journal | None = None
        self._evaluations_left = count((self.run.options.pause or 0) - 1, -1)
        self._stack = ExitStack()

    def __enter__(self) -> TrainingSession:
        # Another process with this run folder also has the port, so the folder is checked first.
        if self.ranks.first:
            check_unused(self.run.folder)
        with ExitStack() as stack:
            self.endpoint = stack.enter_context(
                Endpoint.at_address(
                    self.run.config.metrics_port, self.ranks.rank, self.ranks.local_rank
                )
            )
            self._pins = (
                PinKeeper(f"train-{self.run.folder.name}", self.say) if self.ranks.first else None
            )
            if self._pins is not None:
                stack.enter_context(self._pins)
                self.ending.cleanups.append(self._pins.release)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def pin_start(self, open_on: Callable[[int | None], TrainingRun]) -> None:
        """Keeps the first version from being vacuumed. All ranks get the first rank's version. `open_on` returns the
        run on a version, or on the newest. A run that follows takes the newest if its version is gone."""
        while self._pins is not None and not isinstance(self.run.table, ForeignTable):
            try:
                self._pins.take(self.run.table.uri, self.run.table.version)
                break
            except LostVersion:
                if self.run.config.follow != "epochs":
                    raise
                self.run = open_on(None)
        version = self.ranks.gather_objects(self.run.table.version)[0]
        if version != self.run.table.version:
            self.run = open_on(version)

    def journal(self) -> Journal:
        """Returns the run's journal. The first call creates it."""
        from sluice.dlrm.telemetry.journal import Journal, written_journal

        if self._journal is None and self.ranks.first:
            record = {"kind": "train", **self.run.config.to_dict()}
            folder = RunFolder.create(self.run.folder, record, resume=self.run.options.goes_on)
            self._journal = self._stack.enter_context(written_journal(folder, self.endpoint))
        elif self._journal is None:
            self._journal = Journal(self.endpoint)
        return self._journal

    def on_evaluation(self) -> None:
        """Called on every rank after each evaluation of the validation split. Stops the run where it should pause."""
        if next(self._evaluations_left) == 0:
            self.signals.stop.set()

    def following(self, run: TrainingRun, meta: CheckpointMeta) -> TrainingRun | None:
        """Returns the run on the next version, or None if there is none. With --follow-wait, it waits for one.
        All ranks get the same answer."""
        deadline = time.monotonic() + (
            run.config.follow_wait if run.config.follow == "parts" else 0
        )
        while True:
            with ExitStack() as moving:
                version = self._next_pinned(run.config, meta, moving)
                over = time.monotonic() >= deadline or self.signals.stop.is_set()
                version, over = self.ranks.gather_objects((version, over))[0]
                if version is not None:
                    path, meta = latest(run.folder / "checkpoints")
                    following = follow(run.options, path, meta, version, run.table.permission)
                    self.ranks.barrier()  # Until here, some rank reads files of the version before.
                    return following
            if over:
                return None
            self.signals.stop.wait(1.0)

    def _next_pinned(self, config: Config, meta: CheckpointMeta, moving: ExitStack) -> int | None:
        """Returns the next version on the first rank, pinned together with the one before until `moving` ends."""
        if self._pins is None:
            return None
        while (version := versions.next_version(config, meta)) is not None:
            try:
                moving.enter_context(self._pins.moving(config.data, version))
                break
            except LostVersion:
                if config.follow != "epochs":
                    raise
        return version
