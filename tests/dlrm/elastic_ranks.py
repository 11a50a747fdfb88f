"""The trainer as a user has it, but that each rank writes down which rows it trained, and one of them dies.

    python -m tests.dlrm.elastic_ranks LOG STEP WORDS…     rank 1's first life ends before step STEP
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

    def check(self, batch):
        super().check(batch)
        if "train" not in self._source:
            return
        life, rank = (int(os.environ[n]) for n in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
        if (life, rank, batch.step) == (0, 1, self.dies_at):
            while not list(self.log.parent.glob("run/*/LATEST")):  # the checkpoint before is written meanwhile
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        rows = [int(n) for n in batch.dense[:, 0]]
        with open(self.log / f"{life}-{rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": batch.step, "rows": rows}) + "\n")


if __name__ == "__main__":
    Witness.log, Witness.dies_at = Path(sys.argv[1]), int(sys.argv[2])
    input_checks.BatchChecker = trainer.BatchChecker = Witness  # type: ignore[misc]
    found = main(sys.argv[3:])
    if found is not None:
        print(json.dumps(found), flush=True)
