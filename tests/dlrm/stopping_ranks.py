"""The trainer as a user has it, but that its first rank is stopped in the middle of a step, once something was saved
and it has said that it goes from step to step: `python -m tests.dlrm.stopping_ranks WORDS…`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from sluice.dlrm.liveness import heartbeat
from sluice.dlrm.liveness.activity import MOST_S
from sluice.dlrm.train import main
from sluice.dlrm.training import input_checks, trainer


class Speaks(heartbeat.Heartbeat):
    of_steps = False

    def _report(self, *, over: bool = False) -> None:
        super()._report(over=over)
        Speaks.of_steps = (
            json.loads(self._store.get(f"sluice/beat/{self._rank}"))["silence_s"] < MOST_S
        )


class Stops(input_checks.BatchChecker):
    saved: Path

    def check(self, batch):
        super().check(batch)
        if (
            "train" in self._source
            and os.environ["RANK"] == "0"
            and Speaks.of_steps
            and self.saved.exists()
        ):
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    Stops.saved = Path(sys.argv[sys.argv.index("--run-dir") + 1]) / "checkpoints" / "LATEST"
    input_checks.BatchChecker = trainer.BatchChecker = Stops  # type: ignore[misc]
    heartbeat.Heartbeat = Speaks  # type: ignore[misc]
    found = main(sys.argv[1:])
    if found is not None:
        print(json.dumps(found), flush=True)
