"""Searches settings of the trainer with Optuna: `python examples/search.py --data TABLE --out DIR --auc 0.80`.

A trial is a run of `sluice train` with nine evaluations in an epoch. It pauses after the first and the third. If its
AUC is then below the median of earlier trials, the trial ends. Otherwise it resumes from its checkpoint. To resume an
interrupted search, run the same command again. To search other settings, edit `SPACE`. Options after `--` go to every
trial. The program needs the extra `trainer` and `pip install optuna`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

EVALUATIONS = 9
PAUSES = (1, 3)
"""The numbers of evaluations after which a trial may end early."""
SPACE: dict[str, Any] = {
    "lr": (0.003, 0.3),
    "dense-lr": (0.0003, 0.01),
    "batch-size": [1024, 2048, 4096, 8192],
    "width": [8, 16, 32],
    "over-layers": ["64", "256,128", "512,256"],
    "model": ["dlrm", "dcn"],
}
"""For each option of `sluice train`, a list of values, or the ends of a range that is searched on a log scale."""
Train = Callable[[Path, Sequence[str], int | None], list[float]]
"""Resumes the run in a folder until this number of evaluations, or (None) to its end. Returns its AUCs."""


def propose_settings(trial: optuna.Trial) -> dict[str, Any]:
    """Returns the settings that Optuna proposes for this trial."""
    return {
        name: trial.suggest_categorical(name, choice)
        if isinstance(choice, list)
        else trial.suggest_float(name, *choice, log=True)
        for name, choice in SPACE.items()
    }


def train(folder: Path, words: Sequence[str], until: int | None) -> list[float]:
    """Runs the trainer. Its messages go to a log next to its folder."""
    command = [
        sys.executable,
        "-m",
        "sluice",
        "train",
        "--run-dir",
        str(folder),
        "--resume",
        *words,
    ]
    if until is not None and (missing := until - len(read_aucs(folder))) > 0:
        command += ["--pause-after", str(missing)]
    with folder.with_suffix(".log").open("a") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    return read_aucs(folder)


def read_aucs(folder: Path) -> list[float]:
    """Returns the AUC of each evaluation so far. An evaluation that was repeated after a crash counts once."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return list(
        {
            line["step"]: line["auc"]
            for line in lines
            if line["kind"] == "eval" and line["split"] == "validation" and line["auc"] is not None
        }.values()
    )


class Search:
    """A search whose state is in a folder. It resumes an earlier search in that folder."""

    def __init__(
        self, out: Path, words: Sequence[str], *, seed: int, auc: float | None, train: Train = train
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._words = words
        self._auc = auc
        self._train = train
        storage = JournalStorage(JournalFileBackend(str(out / "optuna.log")))
        self.study = optuna.create_study(
            study_name="search",
            storage=storage,
            direction="maximize",
            pruner=optuna.pruners.MedianPruner(),
            load_if_exists=True,
        )
        # The seed depends on the number of trials, so that a resumed search does not propose the first settings again.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=100_003 * seed + len(self.study.trials)
        )
        # The last trial is failed after an interrupt, and running after a kill. It runs again.
        for trial in self.study.trials[-1:]:
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            if (
                trial.state in (TrialState.RUNNING, TrialState.FAIL)
                and "refused" not in trial.user_attrs
            ):
                self.study.enqueue_trial(trial.params)

    def run(self, trials: int, budget_s: float | None) -> None:
        """Runs trials until `trials` have ended, a trial reaches the AUC, or the time is up."""
        ended = len(self.study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
        if ended < trials and not self.reached:
            self.study.optimize(
                self._score,
                trials - ended,
                budget_s,
                catch=subprocess.CalledProcessError,
                callbacks=[lambda study, _: study.stop() if self.reached else None],
            )

    @property
    def reached(self) -> bool:
        return self._auc is not None and any(
            (trial.value or 0) >= self._auc for trial in self.study.trials
        )

    def _score(self, trial: optuna.Trial) -> float:
        settings, began = propose_settings(trial), time.monotonic()
        words = [
            *self._words,
            "--evals",
            str(EVALUATIONS),
            *(word for name, value in settings.items() for word in (f"--{name}", str(value))),
        ]
        # The same settings get the same folder, so that an interrupted trial resumes.
        folder = self._out / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
        trial.set_user_attr("folder", str(folder))
        for until in (*PAUSES, None):
            try:
                aucs = self._train(folder, words, until)
            except subprocess.CalledProcessError:
                trial.set_user_attr("refused", f"see {folder.with_suffix('.log')}")
                raise
            trial.set_user_attr("seconds", round(time.monotonic() - began, 1))
            if until is not None:
                trial.report(max(aucs), until)
                if trial.should_prune():
                    raise optuna.TrialPruned
        return max(aucs)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="TABLE", help="feature table")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the search"
    )
    parser.add_argument(
        "--auc", type=float, help="end when a trial reaches this AUC on the validation split"
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=30,
        help="most trials, with those of earlier runs (default: 30)",
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no trial after this time"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the proposed settings")
    parser.add_argument("rest", nargs="*", metavar="-- OPTION …", help="for every trial")
    given = parser.parse_args(argv)
    words = [
        "--data",
        given.data,
        *(["--stop-auc", str(given.auc)] if given.auc else []),
        *given.rest,
    ]
    search = Search(given.out, words, seed=given.seed, auc=given.auc)
    search.run(given.trials, given.budget)
    complete = search.study.get_trials(states=[TrialState.COMPLETE])
    best = max(complete, key=lambda trial: trial.value, default=None)
    return {
        "auc": best and best.value,
        "settings": best and best.params,
        "run": best and best.user_attrs["folder"],
        "reached": search.reached,
        "trials": len(search.study.trials),
        "seconds": round(
            sum(trial.user_attrs.get("seconds", 0) for trial in search.study.trials), 1
        ),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
