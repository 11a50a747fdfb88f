"""The trainer as a user has it, but that its first rank is stopped in the middle of a step, once something was saved
and it has said that it goes from step to step. An agent (elastic_agent.py) forks the ranks."""

import json
import os
import signal
from pathlib import Path

from sluice.dlrm import liveness
from sluice.dlrm.liveness import MOST_S
from sluice.dlrm.train import main
from sluice.dlrm.training import input_checks


class Speaks(liveness.Heartbeat):
    of_steps = False

    def report(self, *, over: bool = False) -> None:
        super().report(over=over)
        Speaks.of_steps = (
            json.loads(self.store.get(f"sluice/beat/{self.rank}"))["silence_s"] < MOST_S
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


def make_instead(subclass: type) -> None:
    """Makes its class return instances of the subclass, whoever has imported that class before."""
    subclass.__base__.__new__ = lambda *_, **__: object.__new__(subclass)


def train(*words: str) -> None:
    Stops.saved = Path(words[words.index("--run-dir") + 1]) / "checkpoints" / "LATEST"
    make_instead(Stops)
    make_instead(Speaks)
    main(list(words))
