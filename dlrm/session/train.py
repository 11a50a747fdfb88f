"""Trains on all ranks: `train`. A `TrainingSession` holds what all versions of the table share on one rank."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from sluice.agent.report import narrative, page
from sluice.agent.report.run_folder import RunFolder, check_unused
from sluice.common.errors import Preempted
from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.follow import versions
from sluice.dlrm.foreign_table import ForeignTable
from sluice.dlrm.liveness import Activity, Heartbeat
from sluice.dlrm.rank_exit import Elsewhere, LostRanks, RankExit, tell_ranks
from sluice.dlrm.ranks import Ranks, world
from sluice.dlrm.session.run import TrainingRun
from sluice.dlrm.telemetry.journal import Journal
from sluice.dlrm.telemetry.prometheus import Endpoint, served
from sluice.dlrm.training.signals import StopSignals
from sluice.etl.table.pins import PinKeeper
from sluice.etl.table.table import LostVersion


def train(
    run: TrainingRun,
    open_on: Callable[[int | None], TrainingRun],
    ending: RankExit,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Joins the other ranks and trains. Returns the result on the first rank, and None on the others. Raises Preempted
    on all ranks if SIGTERM ended the run.

    `open_on` opens the run anew, for a table that has changed meanwhile: on a version, or on the newest."""
    config, activity = run.config, Activity(most_s=run.config.stall_after)

    def give_up() -> None:
        ending.leave(
            f"the run was not saved within {run.options.preempt_s:g} s of SIGTERM (--preempt-seconds); --resume goes "
            "on from the newest checkpoint that is complete"
        )

    with (
        world(config.batch_size // config.ranks) as ranks,
        StopSignals(preempt_s=run.options.preempt_s, too_late=give_up) as signals,
        Heartbeat(
            ranks.store,
            ranks.rank,
            ranks.ranks,
            activity,
            ending,
            workers=signals.worker_stacks,
        ),
    ):
        try:
            with TrainingSession(
                run=run, ranks=ranks, signals=signals, activity=activity, ending=ending, say=say
            ) as session:
                session.pin_start(open_on)
                result = session.train_versions()
            preempted = any(ranks.gather_objects(signals.preempted.is_set() and result["stopped"]))
            if ranks.first:
                for line in narrative.last_lines(result["outcome"]):
                    say(line)
                report = page.written(run.folder, say)
                result["report"] = None if report is None else str(report)
        except Exception as error:
            # The rank that reports first knows the cause. The others only see its connections close.
            try:
                cause = tell_ranks(ranks.store, ranks.rank, error)
            except dist.DistError:
                raise LostRanks(
                    f"rank {ranks.rank} on {platform.node()} has lost the first rank's host: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            if cause is None:
                raise
            raise Elsewhere(cause) from error
        outcome = result if ranks.first else None
        if preempted:
            raise Preempted(outcome)
        return outcome


@dataclass(kw_only=True)
class TrainingSession:
    """A context that is open during a run. Its end releases the run folder and the table."""

    run: TrainingRun
    """The run on the version that is trained on."""
    ranks: Ranks
    signals: StopSignals
    activity: Activity
    ending: RankExit
    say: Callable[[str], None]
    _pins: PinKeeper | None = None
    """Keeps versions of the table from being vacuumed. Only the first rank has it."""
    _evaluations: int = 0

    def __enter__(self) -> TrainingSession:
        # Another process with this run folder also has the port, so the folder is checked first.
        if self.ranks.first:
            check_unused(self.run.folder)
        self.endpoint = Endpoint(self.ranks.rank)
        self.journal = Journal(self.endpoint)
        with ExitStack() as stack:
            stack.enter_context(
                served(self.endpoint, self.run.config.metrics_port, self.ranks.local_rank)
            )
            if self.ranks.first:
                self._pins = stack.enter_context(
                    PinKeeper(f"train-{self.run.folder.name}", self.say)
                )
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

    def train_versions(self) -> dict[str, Any]:
        """Trains on one version of the table after the other, until none follows. Returns the result of the last
        one."""
        # This import takes seconds. Signals are answered meanwhile.
        from sluice.dlrm.session.version import train_version

        while (result := train_version(self)) is None:
            gc.collect()  # The model of the version before is freed before the next one is made.
        return {**result, "ranks": self.ranks.ranks, "run": str(self.run.folder)}

    def open_folder(self) -> None:
        """Makes the run folder, or goes on with it. Does nothing if it is open."""
        if self.ranks.first and self.journal.looks is None:
            record = {"kind": "train", **self.run.config.to_dict()}
            self.journal.open(
                RunFolder.create(self.run.folder, record, resume=self.run.options.goes_on)
            )
            self._stack.callback(self.journal.close)

    def on_evaluation(self) -> None:
        """Called on every rank after each evaluation of the validation split. Stops the run where it should pause."""
        self._evaluations += 1
        if self._evaluations == self.run.options.pause:
            self.signals.stop.set()

    def follow(self, meta: CheckpointMeta) -> bool:
        """Moves the run, whose progress is `meta`, to the next version if there is one. All ranks get the same
        answer."""
        config, ranks = self.run.config, self.ranks
        with ExitStack() as moving:
            version = None
            # The first rank keeps both versions from being vacuumed until all ranks have moved.
            while self._pins and (version := versions.next_version(config, meta)) is not None:
                try:
                    moving.enter_context(self._pins.moving(config.data, version))
                    break
                except LostVersion:
                    if config.follow != "epochs":
                        raise
            version = ranks.gather_objects(version)[0]
            if version is None:
                return False
            self.run = self.run.on_version(version)
            ranks.barrier()  # Until here, some rank reads files of the version before.
            return True
