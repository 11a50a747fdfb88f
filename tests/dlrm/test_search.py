"""A search for settings: seeded, resumed as if unbroken, given up early where that pays; over curves that are known."""

from __future__ import annotations

import json
import math

import pytest

import dlrm.model  # noqa: F401  torch makes a folder of its own: before a test is watched
from dlrm.config import ConfigError
from dlrm.search import Trial, main
from dlrm.searching import Ended, Found, Search, front, picture
from dlrm.space import DEFAULT, Space, words
from etl.small import small_table

SPACE = Space({"lr": {"low": 0.001, "high": 1.0, "log": True}, "width": [8, 16, 32], "epochs": {"low": 1, "high": 9}})
RUNGS = 9


def curve(settings: dict, rung: int) -> float:
    """Best at lr 0.05 and width 16; it rises from rung to rung, and better settings lie above worse ones throughout."""
    distance = abs(math.log10(settings["lr"] / 0.05)) + 0.3 * (settings["width"] != 16)
    return 0.8 - 0.1 * distance - 0.05 / rung


def run(number, settings, given_up):
    """A second for each rung."""
    for rung in range(1, RUNGS + 1):
        auc = curve(settings, rung)
        if given_up(auc):
            break
    return Ended(auc=auc, seconds=float(rung))


def until(search: Search, auc: float, most: int = 200) -> float:
    """Seconds of trials until one reaches the AUC."""
    while len(search.found) < most:
        if (search.step(run).auc or 0) >= auc:
            return search.seconds
    pytest.fail(f"no trial of {most} reached {auc}")


def test_the_same_seed_proposes_the_same_trials_and_a_broken_search_goes_on_as_if_it_had_not_been(tmp_path):
    whole = Search(tmp_path / "whole", SPACE, seed=1)
    for _ in range(12):
        whole.step(run)
    for part in (5, 7):
        search = Search(tmp_path / "parts", SPACE, seed=1)
        for _ in range(part):
            search.step(run)
    assert search.found == whole.found
    assert len({json.dumps(one.settings) for one in whole.found}) == 12
    other = Search(tmp_path / "other", SPACE, seed=2)
    assert other.step(run).settings != whole.found[0].settings
    with pytest.raises(ConfigError, match="begun with another seed"):
        Search(tmp_path / "whole", SPACE, seed=3)


def test_a_trial_that_was_broken_off_counts_as_failed(tmp_path):
    def interrupted(*_: object):
        raise KeyboardInterrupt

    search = Search(tmp_path, SPACE, seed=1)
    with pytest.raises(KeyboardInterrupt):
        search.step(interrupted)
    again = Search(tmp_path, SPACE, seed=1)
    assert [(one.state, one.auc) for one in again.found] == [("fail", None)]
    assert again.step(run).number == 1
    failed = again.step(lambda *_: Ended(auc=None, seconds=2.0, error="out of memory"))
    assert (failed.state, failed.seconds) == ("fail", 2.0)


def test_poor_trials_are_given_up_and_the_threshold_costs_a_third_of_a_plain_search(tmp_path):
    """Seconds over two seeds to an AUC that about one random choice in fifty reaches."""
    ours, plain, given_up = [], [], 0
    for seed in range(2):
        search = Search(tmp_path / f"ours {seed}", SPACE, seed=seed)
        ours.append(until(search, 0.785))
        given_up += sum(one.state == "pruned" and one.seconds < RUNGS for one in search.found)
        other = Search(tmp_path / f"plain {seed}", SPACE, seed=seed, plain=True)
        plain.append(until(other, 0.785))
        assert {one.seconds for one in other.found} == {float(RUNGS)}
    assert given_up > 5
    assert sum(ours) <= sum(plain) / 3, (ours, plain)


def test_a_close_second_goes_on_and_a_poor_one_is_given_up(tmp_path):
    """At the first evaluation; until three came as far, nobody is given up."""
    search, aucs = Search(tmp_path, SPACE, seed=1), [0.65, 0.63, 0.708, 0.702, 0.69]

    def run(number, settings, given_up):
        return Ended(auc=aucs[number], seconds=1.0 if given_up(aucs[number]) else 9.0)

    assert [search.step(run).state for _ in aucs] == ["complete", "complete", "complete", "complete", "pruned"]


def test_the_front_is_what_nothing_beats_in_both():
    def one(number: int, auc: float | None, seconds: float, state: str = "complete") -> Found:
        return Found(number=number, settings={"lr": 0.1}, auc=auc, seconds=seconds, state=state)

    found = [one(0, 0.7, 10), one(1, 0.8, 30), one(2, 0.75, 40), one(3, 0.65, 5, "pruned"), one(4, None, 1, "fail"),
             one(5, 0.7, 12)]
    assert [f.number for f in front(found)] == [3, 0, 1]
    assert front([]) == []
    shown = picture(found)
    assert shown.count("<circle") == 5
    assert "best for its time" in shown


def test_a_space_that_cannot_be_is_refused(tmp_path):
    for choices, text in (({"lrr": [1]}, "no option '--lrr' .did you mean '--lr'"), ({"lr": []}, "'lr': write a list"),
                          ({"lr": {"low": 2, "high": 1}}, "is no range"), ({}, "without a setting"),
                          ({"lr": {"low": 0, "high": 1, "log": True}}, "is no range"), ({"model": ["dlrmm"]}, "dlrmm")):
        with pytest.raises(ConfigError, match=text):
            Space(choices)
    (tmp_path / "space.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds no object"):
        Space.read(tmp_path / "space.json")
    assert Space.read(None).choices == DEFAULT
    assert words({"lr": 0.1, "over-layers": "8,4"}) == ["--lr", "0.1", "--over-layers", "8,4"]


@pytest.mark.slow
def test_real_trials(tmp_path):
    """One to its end, with the page; one that is given up at its first evaluation; one that the trainer refuses."""
    small_table(tmp_path / "table", rows=4000, values=20, files=2, row_group_rows=512)
    (tmp_path / "space.json").write_text('{"lr": [0.05, 0.1]}')
    rest = ["--width", "8", "--dense-layers", "16", "--over-layers", "16", "--batch-size", "128", "--log-every", "1"]
    found = main(["--data", str(tmp_path / "table"), "--out", str(tmp_path / "out"), "--trials", "1", "--space",
                  str(tmp_path / "space.json"), "--", *rest])
    assert found["trials"] == 1
    assert found["front"][0]["auc"] == found["auc"] > 0.5
    assert "AUC against seconds" in (tmp_path / "out" / "search.html").read_text()
    trial = Trial(str(tmp_path / "table"), tmp_path, None, [*rest, "--epochs", "1000"])
    ended = trial(0, {"lr": 0.05}, lambda auc: True)
    assert (ended.error, ended.auc is None) == ("", False)
    assert json.loads((tmp_path / "trial-0000" / "config.json").read_text())["optim"]["lr"] == 0.05
    refused = trial(1, {"lr": 0}, lambda auc: False)
    assert "lr: 0.0 is not a positive number" in refused.error
    assert refused.auc is None
