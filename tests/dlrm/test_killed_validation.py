"""A run that is killed after it saved a checkpoint and before it has evaluated it: the resumed run makes that up, so
that its figures, BEST and its end are those of a run that nobody killed."""

import shutil
import signal

import pytest

from benchmarks.small_table import small_table
from tests.dlrm.rig import logged, run_words
from tests.product import best, complete_checkpoints, is_evaluated, latest
from tests.raises import assert_names
from tests.run_program import last_json

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory, forks):
    """A table, and what comes of a run that nobody kills, without and with --stop-auc."""
    path = tmp_path_factory.mktemp("killed")
    small_table(path / "table", rows=1600, values=50, files=2, row_group_rows=256)
    forks.train(*words(path, "whole"), tmp=path)
    return path


def words(folder, run, *more):
    return run_words(folder, "--batch-size 128 --epochs 3 --evals 2 --lr 0.5", *more, run=run)


def evaluations(run):
    """(split, step) → what was measured. A line that a killed run wrote twice counts once, and is the same."""
    found = {}
    for line in logged(run, "eval"):
        key = line["split"], line["step"]
        figures = line["auc"], line["logloss"], line["epoch"]
        assert found.setdefault(key, figures) == figures
    return found


def outcome(run):
    marked = best(run / "checkpoints")
    path, meta = latest(run / "checkpoints")
    assert is_evaluated(path)
    return marked[0].name, marked[1], meta.step, meta.rows, evaluations(run)


def kill_and_resume(forks, folder, run, when, number, *more, ranks=0):
    given = words(folder, run, *more, "--resume")
    program = ("tests.dlrm.killed_validation", when, number)
    forks.run(*program, *given, tmp=folder, ranks=ranks, code=-signal.SIGKILL)
    return forks.train(*given, tmp=folder, ranks=ranks)


@pytest.mark.parametrize(
    ("when", "number"), [("measure", 3), ("measure", 5), ("BEST", 1), ("EVALUATED", 2)]
)
def test_a_validation_that_a_kill_prevented_is_made_up(folder, forks, when, number):
    run = f"{when}-{number}"
    done = kill_and_resume(forks, folder, run, when, number)
    assert outcome(folder / run) == outcome(folder / "whole")
    assert_names(done.stderr, "was saved and not evaluated")


@pytest.mark.parametrize("when", ["measure", "EVALUATED", "test"])
def test_a_run_that_was_good_enough_when_it_was_killed_ends_there(folder, forks, when):
    """Its third evaluation is the first that reaches what was asked for."""
    figures = [auc for (split, _), (auc, *_) in evaluations(folder / "whole").items()]
    number = next(n for n in range(2, 7) if figures[n - 1] > max(figures[: n - 1]))
    stop = ("--stop-auc", (figures[number - 1] + max(figures[: number - 1])) / 2)
    if not (folder / "good").exists():
        forks.train(*words(folder, "good", *stop), tmp=folder)
    whole = outcome(folder / "good")
    assert len(whole[-1]) == number + 1
    run = f"good-{when}"
    done = kill_and_resume(forks, folder, run, when, 1 if when == "test" else number, *stop)
    assert outcome(folder / run) == whole
    assert_names(done.stderr, "that was asked for")


def test_who_goes_back_to_an_older_checkpoint_is_told_of_the_newest(folder, forks):
    shutil.copytree(folder / "whole", folder / "back")
    checkpoints = folder / "back" / "checkpoints"
    *_, older, newest = complete_checkpoints(checkpoints)
    (checkpoints / "LATEST").write_text(older)
    done = forks.train(*words(folder, "back", "--resume"), tmp=folder)
    assert_names(done.stderr, f"LATEST names {older}", f"{newest} was saved later")
    assert outcome(folder / "back")[1:] == outcome(folder / "whole")[1:]


def test_on_two_ranks_of_which_one_is_killed(folder, forks):
    whole = outcome(folder / "whole")
    kill_and_resume(forks, folder, "ranks", "BEST", 1, ranks=2)
    broken = outcome(folder / "ranks")
    assert (broken[0], broken[2:4]) == (whole[0], whole[2:4])
    for key, figures in whole[-1].items():
        assert broken[-1][key] == pytest.approx(figures, abs=1e-4)


def test_a_run_that_follows_makes_it_up_on_the_version_that_it_trained_on(tmp_path, forks):
    """A newer version comes before the resume."""
    small_table(tmp_path / "table", rows=1600, values=50, files=1, row_group_rows=256)
    given = [*words(tmp_path, "run", "--follow", "--resume")]
    program = ("tests.dlrm.killed_validation", "measure", 2)
    forks.run(*program, *given, tmp=tmp_path, code=-signal.SIGKILL)
    at = latest(tmp_path / "run" / "checkpoints")[1]
    assert (at.epoch, at.loader["step"]) == (1, 0)
    small_table(tmp_path / "table", rows=1600, values=50, files=1, mode="overwrite", first=1600)
    done = forks.train(*given, tmp=tmp_path)
    assert last_json(done)["version"] == 1
    (followed,) = logged(tmp_path / "run", "follow")
    assert (followed["before"], followed["after"], followed["step"]) == (0, 1, at.step)
    assert ("validation", at.step) in evaluations(tmp_path / "run")
    assert_names(done.stderr, "was saved and not evaluated")
