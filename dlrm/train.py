"""Trains a recommender on a feature table. All ranks share its embedding tables, and its input is tuned meanwhile.

    sluice train --data TABLE --run-dir DIR
    torchrun --nproc-per-node=2 -m sluice.dlrm.train --data TABLE --run-dir DIR --resume

The first command trains in one process, the second on two ranks. --resume begins a run or goes on with it, on any
number of ranks. --check checks settings and input, and trains nothing.

The last line of standard output is one JSON object: the result, or "error" with the reason. Everything else goes to
standard error. SIGTERM saves a checkpoint, and all ranks end with 143 (torchrun itself ends with 1). Ctrl-C saves
nothing. After both, --resume continues from the last complete checkpoint.
"""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from sluice.common.collector import without_collections
from sluice.common.errors import Preempted, UsageError
from sluice.common.extras import advice
from sluice.common.program import FAILED, INTERRUPTED, USAGE, run
from sluice.dlrm import options
from sluice.dlrm.rank_exit import (
    Elsewhere,
    LostRanks,
    RankExit,
    tell_end,
    tell_ranks,
)
from sluice.dlrm.step_threads import wait_briefly
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.watchdog import Watchdog
from sluice.ingest.machine import Machine

if TYPE_CHECKING:
    from sluice.dlrm.session.run import TrainingRun

_FIRST_SPEAKS_S = 10.0


@without_collections()
def main(argv: list[str]) -> dict[str, Any] | None:
    first, in_touch = os.environ.get("RANK", "0") == "0", False
    ending = RankExit(first=first)
    with Watchdog(ending) as watchdog:
        try:
            given = options.parse(argv, __doc__)
            quiet()
            wait_briefly(os.environ, Machine().cores())
            from sluice.dlrm.session.run import open_run

            training_run = open_run(given)
            if training_run.options.check:
                from sluice.dlrm.session.check import check

                return check(training_run)
            in_touch = True  # from here on ranks tell each other what they met
            return _train(training_run, partial(open_run, given), watchdog)
        except KeyboardInterrupt:
            if first:
                raise
            os._exit(INTERRUPTED)  # the one line printed is enough
        except Preempted:
            raise
        except Exception as error:
            ending.claim()
            if not first and not in_touch:
                # The first rank meets the same and says it; torchrun then ends this one, unless the first met nothing.
                time.sleep(_FIRST_SPEAKS_S)
                first = True
            if isinstance(error, LostRanks):
                first = os.environ.get("LOCAL_RANK", "0") == "0"
            missing = advice(error, "train")
            wrong_input = bool(missing) or isinstance(error, UsageError)
            if first:  # it speaks for all ranks
                trace = ""
                if not wrong_input and not isinstance(error, (Elsewhere, LostRanks)):
                    trace = traceback.format_exc()
                tell_end(missing or str(error), trace=trace)
            raise SystemExit(USAGE if wrong_input else FAILED) from None


def _train(
    run: TrainingRun, open_on: Callable[[int | None], TrainingRun], watchdog: Watchdog
) -> dict[str, Any] | None:
    """Joins the other ranks and trains. Returns the result on the first rank, and None on the others. Raises Preempted
    on all ranks if SIGTERM ended the run.

    `open_on` opens the run anew, for a table that has changed meanwhile: on a version, or on the newest."""
    import torch.distributed as dist

    from sluice.dlrm.liveness import Activity, Heartbeat
    from sluice.dlrm.ranks import world

    config, activity = run.config, Activity(most_s=run.config.stall_after)

    with (
        world(config.batch_size // config.ranks) as ranks,
        watchdog.training(
            Heartbeat(
                ranks.store,
                ranks.rank,
                ranks.ranks,
                activity,
                watchdog.ending,
                workers=watchdog.worker_stacks,
            ),
            preempt_s=run.options.preempt_s,
        ),
    ):
        try:
            # This import takes seconds. Signals are answered meanwhile.
            from sluice.dlrm.session.session import TrainingSession

            with TrainingSession(
                run=run, ranks=ranks, watchdog=watchdog, activity=activity
            ) as session:
                session.pin_start(open_on)
                result = session.train_versions()
            preempted = any(ranks.gather_objects(watchdog.preempted.is_set() and result["stopped"]))
            if ranks.first:
                session.report(result)
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


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    # The threads of gloo abort about one ended run in ten while Python shuts down.
    run(main, at_once=True)


if __name__ == "__main__":
    program()
