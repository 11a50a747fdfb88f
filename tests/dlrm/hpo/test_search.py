"""A search for settings: seeded, resumed as if unbroken, poor ones set aside early; over curves that are known."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from dataclasses import replace

import pytest

from sluice.dlrm import train
from sluice.dlrm.hpo.space import DEFAULT, Space, words
from sluice.dlrm.hpo.study import LEGS, Ended, Found, Search, TrialRunner, expected, front, going_on, picture
from sluice.dlrm.hpo.trials import Trainers, Trial
from sluice.dlrm.model import ranker  # noqa: F401  torch makes a folder of its own: before a test is watched
from sluice.dlrm.options import ConfigError
from sluice.dlrm.search import main
from sluice.etl.common.errors import UsageError
from sluice.etl.synth.small_table import small_table

pytestmark = pytest.mark.slow

SPACE = Space({"lr": {"low": 0.001, "high": 1.0, "log": True}, "width": [8, 16, 32], "epochs": {"low": 1, "high": 9}})
RUNGS = 9


def curve(settings: dict, rung: int) -> float:
    """Best at lr 0.05 and width 16; it rises from rung to rung, and better settings lie above worse ones throughout."""
    distance = abs(math.log10(settings["lr"] / 0.05)) + 0.3 * (settings["width"] != 16)
    return 0.8 - 0.1 * distance - 0.05 / rung


def run(number, settings, until):
    """A second for each evaluation."""
    came = until or RUNGS
    before = came // 3 if until else max(LEGS)
    return Ended(aucs=tuple(curve(settings, rung) for rung in range(1, came + 1)), seconds=float(came - before),
                 stopped=until is not None)


def whole(number, settings, until):
    """As `run`, for a plain search."""
    assert until is None
    return Ended(aucs=tuple(curve(settings, rung) for rung in range(1, RUNGS + 1)), seconds=float(RUNGS))


def until(search: Search, auc: float, run: TrialRunner, most: int = 200) -> float:
    """Seconds of trials until one reaches the AUC."""
    while len(search.found) < most:
        if (search.step(run).auc or 0) >= auc:
            return search.seconds
    pytest.fail(f"no trial of {most} reached {auc}")


def of(*aucs: tuple[float, ...], complete: tuple[int, ...] = (), fail: tuple[int, ...] = ()) -> list[Found]:
    """Trials that came so far; those named to their end."""
    return [Found(number=number, settings={"lr": 0.1}, aucs=some, seconds=float(len(some)), legs=1,
                  state="complete" if number in complete else "fail" if number in fail else "aside")
            for number, some in enumerate(aucs)]


def test_the_same_seed_proposes_the_same_trials_and_a_broken_search_goes_on_as_if_it_had_not_been(tmp_path):
    whole = Search(tmp_path / "whole", SPACE, seed=1)
    for _ in range(24):
        whole.step(run)
    for part in (5, 7, 12):
        search = Search(tmp_path / "parts", SPACE, seed=1)
        for _ in range(part):
            search.step(run)
    assert search.found == whole.found == Search(tmp_path / "parts", SPACE, seed=1).found
    assert len({json.dumps(one.settings) for one in whole.found}) == len(whole.found) >= 12
    other = Search(tmp_path / "other", SPACE, seed=2)
    assert other.step(run).settings != whole.found[0].settings
    with pytest.raises(ConfigError, match="begun with another seed"):
        Search(tmp_path / "whole", SPACE, seed=3)


def test_a_leg_that_was_broken_off_is_made_again(tmp_path):
    """Of a new trial and of one that was set aside; what the crash tore of the search's file is left out."""
    asked: list[tuple] = []

    def interrupted(*asked_for: object):
        asked.append(asked_for)
        raise KeyboardInterrupt

    def again(*asked_for):
        asked.append(asked_for)
        return run(*asked_for)

    for legs in (0, 3):
        search = Search(tmp_path, SPACE, seed=1)
        for _ in range(legs):
            search.step(run)
        before = search.found
        with pytest.raises(KeyboardInterrupt):
            search.step(interrupted)
        with open(tmp_path / "trials.jsonl", "a") as file:
            file.write('{"number": 7')
        search = Search(tmp_path, SPACE, seed=1)
        assert search.found == before
        search.step(again)
        assert asked[-1] == asked[-2]
    assert [one.legs for one in search.found if one.legs > 1]  # the second time it was one that goes on


def test_a_failed_trial_counts_as_the_least(tmp_path):
    search = Search(tmp_path, SPACE, seed=1)
    failed = search.step(lambda *_: Ended(aucs=(0.9,), seconds=2.0, error="the loss is nan"))
    assert (failed.state, failed.seconds) == ("fail", 2.0)
    assert search.step(run).number == 1
    assert expected(of((0.9,), (0.7,), (0.6,), fail=(0,))) == [0.6, 0.7, 0.6]
    assert going_on(of((0.9,), (0.7,), (0.6,), (0.5,), fail=(0,)), more=False).number == 1


def test_poor_trials_are_set_aside_and_the_threshold_costs_a_third_of_a_plain_search(tmp_path):
    """Seconds over two seeds to an AUC that about one random choice in fifty reaches."""
    ours, plain, poor = [], [], 0
    for seed in range(2):
        search = Search(tmp_path / f"ours {seed}", SPACE, seed=seed)
        ours.append(until(search, 0.785, run))
        poor += sum(len(one.aucs) == 1 for one in search.found)
        plain.append(until(Search(tmp_path / f"plain {seed}", SPACE, seed=seed, plain=True), 0.785, whole))
    assert poor > 5
    assert sum(ours) <= sum(plain) / 3, (ours, plain)


def test_the_best_of_those_that_came_as_far_goes_on():
    assert going_on([]) is None
    assert going_on(of((0.6,), (0.7,))) is None  # too few to hold it against
    assert going_on(of((0.6,), (0.7,), (0.65,))).number == 1
    on = (0.7, 0.72, 0.75)
    assert going_on(of((0.6,), on, (0.65,))) is None  # the best has gone on, and is alone
    assert going_on(of((0.6,), on, (0.69,), (0.65,), (0.64,), (0.63,))).number == 2
    assert going_on(of((0.6,), on, (0.69, 0.7, 0.74), (0.65,), (0.64,), (0.63,))).number == 1  # the furthest first
    assert going_on(of((0.6,), (0.7,) * 9, (0.65,), complete=(1,))) is None


def test_once_no_more_begin_the_one_of_which_most_is_expected_is_seen_to_its_end():
    some = of((0.6,), (0.7, 0.72, 0.75), (0.65,))
    assert expected(some) == pytest.approx([0.65, 0.75, 0.7])
    assert going_on(some, more=False).number == 1
    ended = of((0.6,), (0.7, 0.72, 0.75, 0.74), (0.72,), complete=(1,))
    assert expected(ended) == pytest.approx([0.65, 0.75, 0.77])
    assert going_on(ended, more=False).number == 2
    assert going_on(of((0.6,), (0.7, 0.72, 0.75), complete=(1,)), more=False) is None
    assert going_on([], more=False) is None


def test_the_front_is_what_nothing_beats_in_both():
    found = [replace(one, seconds=seconds) for one, seconds in zip(
        of((0.7,), (0.8,), (0.75,), (0.65,), (), (0.7,), complete=(0, 1, 2, 5), fail=(4,)), (10, 30, 40, 5, 1, 12),
        strict=True)]
    assert [f.number for f in front(found)] == [3, 0, 1]
    assert front([]) == []
    shown = picture(found)
    (panel,) = json.loads(re.search(r'<script.*?>(.*?)</script>', shown)[1])["panels"]
    assert sum(len(one["at"]) for one in panel["series"] if one["style"] == "dots") == 5
    assert "best for its time" in shown


def test_a_space_that_cannot_be_is_refused(tmp_path):
    for choices, text in (({"lrr": [1]}, "no option '--lrr' .did you mean '--lr'"), ({"lr": []}, "'lr': write a list"),
                          ({"lr": {"low": 2, "high": 1}}, "is no range"), ({}, "without a setting"),
                          ({"lr": {"low": 0, "high": 1, "log": True}}, "is no range"), ({"model": ["dlrmm"]}, "dlrmm")):
        with pytest.raises(UsageError, match=text):
            Space(choices)
    (tmp_path / "space.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds no object"):
        Space.read(tmp_path / "space.json")
    assert Space.read(None).choices == DEFAULT
    assert words({"lr": 0.1, "over-layers": "8,4"}) == ["--lr", "0.1", "--over-layers", "8,4"]


def test_a_misspelt_option_is_answered_with_the_one_that_may_be_meant():
    with pytest.raises(UsageError, match=r".did you mean '--data'"):
        main(["--dtaa", "t"])


def test_a_pause_after_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main(["--run-dir", str(tmp_path / "run"), "--data", "t", "--pause-after", "0"])
    assert "--pause-after: 0 is not a whole number of 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_real_trials(tmp_path):
    """A search to its end, with the page; a trial that is set aside and goes on as if it had not been; one that the
    trainer refuses; one whose search is gone."""
    small_table(tmp_path / "table", rows=4000, values=20, files=2, row_group_rows=512)
    (tmp_path / "space.json").write_text('{"lr": [0.05, 0.1]}')
    rest = ["--width", "8", "--dense-layers", "16", "--over-layers", "16", "--batch-size", "128", "--log-every", "1"]
    found = main(["--data", str(tmp_path / "table"), "--out", str(tmp_path / "out"), "--trials", "1", "--space",
                  str(tmp_path / "space.json"), "--", *rest])
    assert found["trials"] == 1
    assert found["front"][0]["auc"] == found["auc"] > 0.5
    assert "AUC against seconds" in (tmp_path / "out" / "search.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    assert [(line["state"], len(line["aucs"])) for line in lines[1:]] == [("aside", 1), ("aside", 3), ("complete", 9)]
    with Trainers() as trainers:
        trial = Trial(trainers, str(tmp_path / "table"), tmp_path, None, rest)
        aside, on = trial(0, {"lr": 0.05}, 1), trial(0, {"lr": 0.05}, None)
        assert (aside.error, aside.stopped, len(aside.aucs), on.error, on.stopped) == ("", True, 1, "", False)
        assert on.processor_s > aside.processor_s > 0
        assert on.aucs == trial(1, {"lr": 0.05}, None).aucs
        assert on.aucs[:1] == aside.aucs
        assert json.loads((tmp_path / "trial-0000" / "config.json").read_text())["optim"]["lr"] == 0.05
        refused = trial(2, {"lr": 0}, None)
        assert "lr: 0.0 is not a positive number" in refused.error
        assert refused.aucs == ()
        trainers.begin(["--data", str(tmp_path / "table"), "--run-dir", str(tmp_path / "gone"), *rest, "--epochs",
                        "100000"], tmp_path / "gone.log")
        end = time.monotonic() + 60
        while not (tmp_path / "gone" / "checkpoints" / "LATEST").exists():
            assert time.monotonic() < end, (tmp_path / "gone.log").read_text()
            threading.Event().wait(0.02)
    assert json.loads((tmp_path / "gone.log").read_text().splitlines()[-1])["stopped"] is True
