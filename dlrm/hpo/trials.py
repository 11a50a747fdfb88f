"""The trials of a search: runs of the trainer, one after the other, each in legs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.agent.report.run_folder import read_lines
from sluice.dlrm.hpo.space import words

_EVALS = 9
"""Evaluations in an epoch; `sluice.dlrm.hpo.study` says after which a trial is set aside."""


class Trainers:
    """The process that starts trainers (`sluice.dlrm.hpo.trial_server`). It runs from the first trainer on, for as long
    as the context lasts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets a trainer that still runs save and end."""
        if self._process is not None:
            self._process.communicate()

    def run(self, words: Sequence[str], log: Path) -> float:
        """Runs one trainer; returns the processor time that it took, in seconds."""
        self.begin(words, log)
        return self.ended()

    def begin(self, words: Sequence[str], log: Path) -> None:
        if self._process is None:
            self._process = subprocess.Popen([sys.executable, "-m", "sluice.dlrm.hpo.trial_server"],
                                             stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, text=True,
                                             env={"OMP_NUM_THREADS": "1", **os.environ})
        print(json.dumps({"words": words, "log": str(log)}), file=self._process.stdin, flush=True)

    def ended(self) -> float:
        line = self._process.stdout.readline() if self._process is not None and self._process.stdout else ""
        if not line:
            raise RuntimeError("the process that starts trainers is gone; begin the search again to go on with it")
        return float(json.loads(line)["processor_s"])


class Trial:
    """A run of the trainer, a leg at a time."""

    def __init__(self, trainers: Trainers, data: str, folder: Path, auc: float | None, rest: list[str]) -> None:
        self._trainers, self._data, self._folder, self._auc, self._rest = trainers, data, folder, auc, rest
        self.error = ""

    def __call__(self, number: int, settings: dict[str, Any], until: int | None) -> Any:
        from sluice.dlrm.hpo.study import Ended

        folder, log = self._folder / f"trial-{number:04d}", self._folder / f"trial-{number:04d}.log"
        command = ["--data", self._data, "--run-dir", str(folder), "--resume", "--evals", str(_EVALS),
                   *words(settings), *self._rest]
        if self._auc is not None:
            command += ["--stop-auc", str(self._auc)]
        if until is not None:
            command += ["--pause-after", str(max(1, until - len(_validations(folder))))]
        began = time.monotonic()
        used = self._trainers.run(command, log)
        result = _result(log)
        self.error = str(result.get("error", ""))
        return Ended(aucs=tuple(_validations(folder)), seconds=time.monotonic() - began, processor_s=used,
                     stopped=bool(result.get("stopped")), error=self.error)


def _validations(folder: Path) -> list[float]:
    """The AUC of each validation, once a step: one that was broken off before its checkpoint was complete is
    repeated."""
    return list({line["step"]: line["auc"] for line in read_lines(folder / "metrics.jsonl")
                 if line["kind"] == "eval" and line["split"] == "validation" and line["auc"] is not None}.values())


def _result(log: Path) -> dict[str, Any]:
    """The JSON object in the trainer's last line."""
    try:
        return dict(json.loads(log.read_text(errors="replace").splitlines()[-1]))
    except (OSError, ValueError, TypeError, IndexError):
        return {"error": "the trainer ended without a word; its log is beside its folder"}
