"""The trainer as a user has it, but one thing lasts until SIGTERM has come, or longer.

python -m tests.dlrm.preempted_ranks step WORDS…     the last rank's fourth step lasts until the signal
python -m tests.dlrm.preempted_ranks save WORDS…     a checkpoint that is written after it is never done"""

from __future__ import annotations

import sys
import threading

from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.dlrm.session import train
from sluice.dlrm.train import program
from sluice.dlrm.training import input_checks, signals


class Signals(signals.StopSignals):
    def __enter__(self) -> Signals:
        super().__enter__()
        {"step": hold_step, "save": hold_save}[how](self)
        return self


def hold_step(watch: Signals) -> None:
    check = input_checks.BatchChecker.check

    def slow(self, batch) -> None:
        if "train" in self._source and batch.step == 3 and watch._rank:
            print("a step lasts", file=sys.stderr, flush=True)
            assert watch.preempted.wait(60)
        check(self, batch)

    input_checks.BatchChecker.check = slow


def hold_save(watch: Signals) -> None:
    write = CheckpointDisk.write

    def hung(self, path, parts) -> None:
        if watch.preempted.is_set():
            threading.Event().wait()
        write(self, path, parts)

    CheckpointDisk.write = hung


if __name__ == "__main__":
    how = sys.argv.pop(1)
    train.StopSignals = Signals  # type: ignore[misc]
    program()
