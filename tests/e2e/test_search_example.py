"""The example that looks for settings: over curves that are known, and two trials of the real trainer."""

import importlib
import json
import math
from unittest.mock import Mock

import pytest

from benchmarks.small_table import small_table
from tests.dlrm.rig import SMALL_MODEL

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow
END = 9


@pytest.fixture
def search(repo, monkeypatch):
    monkeypatch.syspath_prepend(str(repo / "examples"))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    example = importlib.import_module("search")
    monkeypatch.setattr(example, "SPACE", {"lr": (0.001, 1.0), "width": [8, 16, 32]})
    return example


class Curves:
    """Stands for the trainer: best at lr 0.05 and width 16, and better settings lie above worse ones throughout."""

    def __init__(self) -> None:
        self.legs: list[tuple[str, int | None]] = []

    def __call__(self, folder, words, until):
        self.legs.append((folder.name, until))
        given = dict(zip(words[::2], words[1::2], strict=True))
        distance = abs(math.log10(float(given["--lr"]) / 0.05)) + 0.3 * (given["--width"] != "16")
        return [0.8 - 0.1 * distance - 0.05 / step for step in range(1, (until or END) + 1)]


def test_poor_trials_are_given_up_at_a_pause_and_a_search_ends_at_its_aim(search, tmp_path):
    curves = Curves()
    searching = search.Search(tmp_path, [], seed=1, auc=0.785, train=curves)
    searching.run(60, None)
    states = [trial.state.name for trial in searching.study.trials]
    assert searching.reached
    assert searching.study.best_value >= 0.785
    assert len(states) < 60
    assert states[-1] == "COMPLETE"
    assert states.count("PRUNED") >= 3
    assert {until for _, until in curves.legs} == {1, 3, None}
    last = {folder: until for folder, until in curves.legs}
    assert sum(until is None for until in last.values()) == states.count("COMPLETE")


def test_a_real_trial_pauses_twice_and_goes_on(search, tmp_path, monkeypatch, forks):
    def run_forked(command, *, stdout, **_):
        assert command[1:4] == ["-m", "sluice", "train"]
        stdout.write(forks.train(*command[4:], tmp=tmp_path).stdout)

    monkeypatch.setattr(search, "subprocess", Mock(run=run_forked))
    small_table(tmp_path / "table", rows=4000, values=20, files=2, row_group_rows=512)
    monkeypatch.setattr(search, "SPACE", {"lr": [0.05]})
    last = search.main(
        [
            "--data",
            str(tmp_path / "table"),
            "--out",
            str(tmp_path / "out"),
            "--trials",
            "1",
            "--",
            *SMALL_MODEL,
            "--batch-size",
            "128",
            "--log-every",
            "1",
        ]
    )
    assert (last["trials"], last["settings"], last["reached"]) == (1, {"lr": 0.05}, False)
    assert last["auc"] > 0.5
    (folder,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    aucs = search.read_aucs(folder)
    assert (len(aucs), max(aucs)) == (END, last["auc"])
    ends = [
        json.loads(line)
        for line in folder.with_suffix(".log").read_text().splitlines()
        if line.startswith("{")
    ]
    assert [end["stopped"] for end in ends] == [True, True, False]
