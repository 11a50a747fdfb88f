"""The trainer as a user has it, but one thing lasts until SIGTERM has come, or longer.

python -m tests.dlrm.preempted_ranks step WORDS…     the last rank's fourth step lasts until the signal
python -m tests.dlrm.preempted_ranks save WORDS…     a checkpoint that is written after it is never done"""

import os
import sys
import threading

from sluice.dlrm import train
from tests.product import BatchChecker, CheckpointDisk, Watchdog


class Signals(Watchdog):
    def __enter__(self):
        check, write = BatchChecker.check, CheckpointDisk.write

        def slow(checker, batch):
            if batch.step == 3 and os.environ.get("RANK", "0") != "0":
                print("a step lasts", file=sys.stderr, flush=True)
                assert self.preempted.wait(60)
            check(checker, batch)

        def hung(disk, path, parts):
            if self.preempted.is_set():
                threading.Event().wait()
            write(disk, path, parts)

        if how == "step":
            BatchChecker.check = slow
        else:
            CheckpointDisk.write = hung
        return super().__enter__()


if __name__ == "__main__":
    how = sys.argv.pop(1)
    train.Watchdog = Signals
    train.program()
