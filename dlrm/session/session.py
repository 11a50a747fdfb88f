"""A run of the trainer on all ranks: `TrainingSession` trains on one version of the table after the other;
without --follow there is only one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

from sluice.agent.report import page
from sluice.agent.report.live_server import shown
from sluice.dlrm.checkpoint.meta import CheckpointMeta, latest
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.versions import StartPoint
from sluice.dlrm.liveness.activity import Activity
from sluice.dlrm.liveness.heartbeat import Heartbeat
from sluice.dlrm.liveness.rank_exit import Elsewhere, RankExit
from sluice.dlrm.ranks import Ranks, world
from sluice.dlrm.telemetry.prometheus import Endpoint
from sluice.dlrm.training.signals import StopSignals
from sluice.etl.table.pins import PinKeeper

if TYPE_CHECKING:
    from sluice.dlrm.telemetry.journal import Journal, Silence


def train(start: StartPoint, ending: RankExit, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Joins the other ranks and trains; returns the result on the first rank, and None on the others."""
    activity = Activity(most_s=start.config.stall_after)
    with (
        world() as ranks,
        StopSignals(ranks.store, ranks.rank) as signals,
        Heartbeat(
            ranks.store, ranks.rank, ranks.ranks, activity, ending, workers=signals.worker_stacks
        ),
    ):
        try:
            with TrainingSession(
                start, ranks, signals, activity, ending=ending, say=say
            ) as session:
                result = session.run()
            if not ranks.first:
                return None
            if "outcome" in result:
                say(
                    "\n".join(
                        [
                            result["outcome"]["headline"],
                            *(
                                f"{occasion['label']}. {occasion['sentence']}"
                                for occasion in result["outcome"]["occasions"]
                            ),
                        ]
                    )
                )
            report = page.written(start.run, say)
            return {**result, "report": None if report is None else str(report)}
        except Exception as error:
            # The rank that reports first knows the cause; the others only see its connections close.
            cause = signals.other_ranks_error()
            if cause is None:
                signals.report_error(str(error))
                raise
            raise Elsewhere(cause) from error


class TrainingSession:
    """What all parts of a run share on one rank. It is a context; closing it frees the run folder and the table."""

    def __init__(
        self,
        start: StartPoint,
        ranks: Ranks,
        signals: StopSignals,
        activity: Activity,
        *,
        ending: RankExit,
        say: Callable[[str], None],
    ) -> None:
        self.ranks = ranks
        self.signals = signals
        self.activity = activity
        self.ending = ending
        self._start, self._say = start, say
        self._journal: Journal | Silence | None = None
        self._evaluations_left = count((start.pause or 0) - 1, -1)
        self._stack = ExitStack()

    def __enter__(self) -> TrainingSession:
        with ExitStack() as stack:
            self.endpoint = stack.enter_context(
                Endpoint.at_address(
                    self._start.config.metrics_port, self.ranks.rank, self.ranks.local_rank
                )
            )
            if self.ranks.first:
                stack.enter_context(shown(self._start.run, self._start.config.live, self._say))
            self._pins = (
                PinKeeper(f"train-{self._start.run.name}", self._say) if self.ranks.first else None
            )
            if self._pins is not None:
                stack.enter_context(self._pins)
                self.ending.cleanups.append(self._pins.release)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self) -> dict[str, Any]:
        """Trains until nothing follows; returns the result on the last version."""
        from sluice.dlrm.session.version_run import (
            VersionRun,
        )  # heavy, and a signal is heeded meanwhile

        result: dict[str, Any] = {}
        following: StartPoint | None = self._start
        while following is not None:
            start = following
            if self._pins is not None:
                self._pins.take(start.table.uri, start.table.version)
            self.ranks.barrier()  # pinned before any rank looks whether all files are there
            gc.collect()  # what held the model before is gone, and this holds the next one
            result, following = VersionRun(self, start).train()
        return {**result, "ranks": self.ranks.ranks, "run": str(self._start.run)}

    def journal(self) -> Journal | Silence:
        """The run's journal; it is made once the first part knows that it can begin."""
        from sluice.dlrm.telemetry.journal import Journal, Silence

        if self._journal is None:
            self._journal = (
                self._stack.enter_context(
                    Journal.of_run(self._start.run, self._start.config, resume=self._start.go_on)
                )
                if self.ranks.first
                else Silence()
            )
        return self._journal

    def on_evaluation(self) -> None:
        """Is called at each evaluation of the validation split, on every rank; at the last one before a pause, it asks
        the run to stop."""
        if next(self._evaluations_left) == 0:
            self.signals.stop.set()

    def following(self, start: StartPoint, meta: CheckpointMeta) -> StartPoint | None:
        """The start on the next version of the table, the same on every rank; None if there is none. With
        --follow-wait, it waits for one."""
        deadline = time.monotonic() + (
            start.config.follow_wait if start.config.follow == "parts" else 0
        )
        while True:
            version = versions.next_version(start.config, meta) if self.ranks.first else None
            over = time.monotonic() >= deadline or self.signals.stop.is_set()
            version, over = self.ranks.gather_objects((version, over))[0]
            if version is not None:
                path, meta = latest(start.run / "checkpoints")
                return versions.start_on(
                    start.run,
                    path,
                    meta,
                    version,
                    split_moved=start.split_moved,
                    allow_code=start.table.permission,
                )
            if over:
                return None
            self.signals.stop.wait(1.0)
