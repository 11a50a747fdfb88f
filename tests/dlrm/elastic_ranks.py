"""The trainer as a user has it, but that each rank writes down which rows it trained, and one of them is disturbed.

    python -m tests.dlrm.elastic_ranks LOG WHAT@STEP WORDS…

This happens to an agent's last rank, before the first step from STEP on. `kill`: it dies, and if it is the agent's only
one, the agent dies with it. `hold`: once it has reported a step, it makes LOG/held and waits for LOG/go. After that,
and with `none`, nothing happens.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from sluice.dlrm.train import main
from sluice.dlrm.training import input_checks
from tests.dlrm.stopping_ranks import Speaks, make_instead
from tests.product import latest


class Witness(input_checks.BatchChecker):
    """Writes down the rows of each training batch: the table has their numbers in its first dense column."""

    log: Path
    what: str
    at: int
    begun = 0
    """The step at which these ranks went on."""

    def check(self, batch):
        super().check(batch)
        if "train" not in self._source:
            return
        rank, local, beside = (
            int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        if local == beside - 1 and batch.step >= self.at and not self._is_over():
            self._disturb(alone=beside == 1)
        rows = [int(n) for n in batch.dense[:, 0]]
        with open(self.log / f"{self.begun}-{rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": batch.step, "rows": rows}) + "\n")

    def _is_over(self) -> bool:
        """Whether it has happened: it happens once."""
        mark = {"kill": "killed", "hold": "go"}.get(self.what)
        return mark is None or (self.log / mark).exists()

    def _disturb(self, *, alone: bool) -> None:
        until(lambda: saved(self.log) > self.begun)  # the checkpoint before is written meanwhile
        if self.what == "kill":
            (self.log / "killed").touch()
            if alone:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hold":
            until(lambda: Speaks.of_steps)
            (self.log / "held").touch()
            until((self.log / "go").exists)


def until(holds) -> None:
    while not holds():  # another process makes it true
        time.sleep(0.01)


def saved(log: Path) -> int:
    """The step of the newest checkpoint, and 0 if there is none."""
    checkpoints = log.parent / "run" / "checkpoints"
    return latest(checkpoints)[1].step if (checkpoints / "LATEST").exists() else 0


def train(log: str, what: str, *words: str) -> None:
    Witness.log = Path(log)
    Witness.what, _, step = what.partition("@")
    Witness.at, Witness.begun = int(step or 0), saved(Witness.log)
    make_instead(Speaks)
    make_instead(Witness)
    result = main(list(words))
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:])
