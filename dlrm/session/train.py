"""Runs the trainer on all ranks: it trains on one version of the table after the other, or on one without --follow."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from sluice.agent.report import narrative, page
from sluice.common.collector import without_collections
from sluice.common.errors import Preempted
from sluice.dlrm.liveness.activity import Activity
from sluice.dlrm.liveness.heartbeat import Heartbeat
from sluice.dlrm.liveness.rank_exit import Elsewhere, LostRanks, RankExit
from sluice.dlrm.ranks import world
from sluice.dlrm.session.run import TrainingRun
from sluice.dlrm.session.session import TrainingSession
from sluice.dlrm.training.signals import StopSignals
from sluice.ingest.row_order import rank_rows


def train(
    run: TrainingRun,
    open_on: Callable[[int | None], TrainingRun],
    ending: RankExit,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Joins the other ranks and trains. Returns the result on the first rank, and None on the others. Raises Preempted
    on all ranks if SIGTERM ended the run.

    `open_on` opens the run anew, for a table that has changed meanwhile: on a version, or on the newest."""
    activity = Activity(most_s=run.config.stall_after)

    def give_up() -> None:
        ending.leave(
            f"the run was not saved within {run.options.preempt_s:g} s of SIGTERM (--preempt-seconds); --resume goes "
            "on from the newest checkpoint that is complete"
        )

    with (
        world(rank_rows(run.config.batch_size, run.config.ranks)) as ranks,
        StopSignals(
            ranks.store, ranks.rank, preempt_s=run.options.preempt_s, too_late=give_up
        ) as signals,
        Heartbeat(
            ranks.store, ranks.rank, ranks.ranks, activity, ending, workers=signals.worker_stacks
        ),
    ):
        try:
            with TrainingSession(
                run=run, ranks=ranks, signals=signals, activity=activity, ending=ending, say=say
            ) as session:
                session.pin_start(open_on)
                result = _train_versions(session)
            preempted = any(ranks.gather_objects(signals.preempted.is_set() and result["stopped"]))
            if ranks.first:
                for line in narrative.last_lines(result["outcome"]):
                    say(line)
                report = page.written(run.folder, say)
                result["report"] = None if report is None else str(report)
            if preempted:
                raise Preempted(result if ranks.first else None)
            return result if ranks.first else None
        except Preempted:
            raise
        except Exception as error:
            # The rank that reports first knows the cause. The others only see its connections close.
            try:
                cause = signals.other_ranks_error()
            except dist.DistError:
                raise LostRanks(
                    f"rank {ranks.rank} on {platform.node()} has lost the first rank's host: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            if cause is None:
                signals.report_error(str(error))
                raise
            raise Elsewhere(cause) from error


def _train_versions(session: TrainingSession) -> dict[str, Any]:
    """Trains until no version follows. Returns the result of the last one."""
    # This import takes seconds. Signals are answered meanwhile.
    with without_collections():
        from sluice.dlrm.session.version_run import VersionRun

    following: TrainingRun | None = session.run
    while following is not None:
        gc.collect()  # The model of the version before is freed before the next one is made.
        result, following = VersionRun(session, following).train()
    return {**result, "ranks": session.ranks.ranks, "run": str(session.run.folder)}
