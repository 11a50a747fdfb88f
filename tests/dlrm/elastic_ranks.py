"""The trainer as a user has it, but that each rank writes down which rows it trained, and one of them dies.

    python -m tests.dlrm.elastic_ranks LOG STEP WORDS…

The first life of an agent's last rank ends before step STEP (−1: it does not). If it is the agent's only one, the agent
dies with it, as when a host is lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from sluice.dlrm.train import main
from sluice.dlrm.training import input_checks, trainer


class Witness(input_checks.BatchChecker):
    """Writes down the rows of each training batch: the table has their numbers in its first dense column."""

    log: Path
    dies_at = -1
    life = 0
    """0 until there is a checkpoint to go on from."""

    def check(self, batch):
        super().check(batch)
        if "train" not in self._source:
            return
        rank, local, beside = (
            int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        if (self.life, local, batch.step) == (0, beside - 1, self.dies_at):
            while not saved(self.log):  # the checkpoint before is written meanwhile
                time.sleep(0.01)
            if beside == 1:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        rows = [int(n) for n in batch.dense[:, 0]]
        with open(self.log / f"{self.life}-{rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": batch.step, "rows": rows}) + "\n")


def saved(log: Path) -> bool:
    return bool(list(log.parent.glob("run/*/LATEST")))


if __name__ == "__main__":
    Witness.log, Witness.dies_at = Path(sys.argv[1]), int(sys.argv[2])
    Witness.life = int(saved(Witness.log))
    input_checks.BatchChecker = trainer.BatchChecker = Witness  # type: ignore[misc]
    found = main(sys.argv[3:])
    if found is not None:
        print(json.dumps(found), flush=True)
