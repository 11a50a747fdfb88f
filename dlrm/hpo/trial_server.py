"""Runs trainers one after the other, each in a process forked from this one: that has imported everything once.

    python -m sluice.dlrm.hpo.trial_server     for dlrm.search: a line {"words": [...], "log": FILE} on standard input
    begins one

An ended one is answered by {"code": N, "processor_s": S}, in which its own children count.
Once standard input is closed, the trainer saves and leaves, as at SIGTERM, and so does this process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from sluice.etl.common.program import run

_LATE = ("sluice.dlrm.train", "sluice.dlrm.session.version_run", "sluice.dlrm.session.session",
         "sluice.dlrm.training.assemble", "sluice.dlrm.follow.transplant",
         "sluice.dlrm.checkpoint.save_load", "sluice.dlrm.telemetry.prometheus", "sluice.dlrm.telemetry.journal",
         "sluice.dlrm.evaluation.validation",
         "sluice.dlrm.run_plan", "sluice.dlrm.training.trainer", "sluice.dlrm.training.signals",
         "sluice.agent.report.page", "pandas", "tensorboardX",
         "torch.distributed.optim", "torchrec.distributed.fbgemm_qcomm_codec")
"""Modules that the trainer, or one of its libraries, imports only once it begins."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches the trainer, too
    _import()
    asked = os.fdopen(0, "rb", buffering=0)  # unbuffered: whether there is more can be asked of the system
    while line := asked.readline():
        pid = os.fork()
        if not pid:
            _train(json.loads(line))
        ended = os.pidfd_open(pid)
        if ended not in select.select([0, ended], [], [])[0]:
            os.kill(pid, signal.SIGTERM)
        _, status, used = os.wait4(pid, 0)
        os.close(ended)
        _say(code=os.waitstatus_to_exitcode(status), processor_s=round(used.ru_utime + used.ru_stime, 3))


def _import() -> None:
    """Imports all that a trainer needs. This starts no GPU: that is left to the trainer."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # libraries ask for one while they are imported
    for name in _LATE:
        with suppress(ModuleNotFoundError):  # a trial that needs it says which extra holds it
            import_module(name)
    from sluice.ingest.read.petastorm import compat

    with suppress(ModuleNotFoundError):  # without it, trials read by Arrow
        compat.install()


def _train(asked: dict[str, Any]) -> NoReturn:
    """Trains in the new process as the trainer's own command line would, with its output in the log."""
    from sluice.dlrm import train
    from sluice.dlrm.liveness.rank_exit import RankExit, end_with_launcher

    end_with_launcher(RankExit(first=True))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run(train.main, argv=asked["words"], at_once=True)


def _say(**answer: Any) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:  # nobody waits for it any more
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
