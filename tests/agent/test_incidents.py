"""Incidents of a run, read from its folder: cause, notice, what was done, how long recovery took."""

import json
import re
from dataclasses import replace

import pytest

from sluice.agent.report import page
from sluice.agent.report.incidents import find_incidents
from tests.agent.grown_run import decided, effect, written
from tests.product import Story
from tests.raises import assert_names

CORES = {"kind": "incident", "what": "cores", "text": "the cores at hand went from 2 to 1"}


def _run(tmp_path, events, rates, config=None, calm=0):
    """`rates` are one a second, from the first second on. Up to `calm`, only the best rate stalls little; after it all
    cores are in use."""
    lines = [
        {
            "at": float(at),
            "kind": "loader",
            "rows_per_s": rate,
            "stall": 0.1 if rate == 200 else 0.5,
            "demand_rows_per_s": 120.0,
            "cpu": 1.0,
            "cpu_quota": 4.0 if at <= calm else 1.0,
        }
        for at, rate in enumerate(rates, 1)
    ]
    return written(tmp_path, *events, *lines, config=config)


def _with_looks(run, *changes):
    """The run with other figures in its looks."""
    metrics = (line | change for line, change in zip(run.metrics, changes, strict=True))
    return replace(run, metrics=tuple(metrics))


FAULTS = [
    ("slow-store=0.6s@10s", "workload", "a row became 8 times dearer in decode"),
    ("kill-worker=1@10s", "worker", "2 worker processes died and were replaced"),
]


def _answered(fault, what, seen, at):
    """A fault at 10 s, noticed at 12 s, and the change that answers it."""
    return [
        {"at": 10.0, "kind": "fault", "fault": fault, "did": "so"},
        {"at": 12.0, "kind": "incident", "what": what, "text": seen},
        decided(at),
    ]


@pytest.mark.parametrize(("fault", "what", "seen"), FAULTS)
def test_a_fault_is_told_with_what_was_noticed_of_it_and_how_long_the_trainer_waited(
    tmp_path, fault, what, seen
):
    rates = [200.0] * 10 + [50.0] * 6 + [200.0] * 14
    story = Story.of(_run(tmp_path, _answered(fault, what, seen, at=14.0), rates))
    (incident,) = story.incidents
    assert incident.waited == pytest.approx((0.1, 0.5, 0.1))
    assert_names(
        incident.sentence,
        "At 10 s",
        fault,
        "seen after 2 s",
        seen,
        "changed after 4 s by decode 1 → 2",
        "waiting 10 % → 50 % → 10 %",
        "200 → 200 rows/s",
        "after 7 s",
        "recovered",
    )
    assert (incident.label, incident.what, incident.noticed_s, incident.did) == (
        "A",
        what,
        2.0,
        ("decode 1 → 2",),
    )
    assert incident.sentence in story.explanation
    assert not story.outcome.faults, "a fault on purpose is no fault of the tuning"


@pytest.mark.parametrize(("stall", "result"), [(0.01, "the input keeps up"), (0.3, "still slow")])
def test_a_lower_rate_is_the_trainers_own_where_it_waits_for_nothing(tmp_path, stall, result):
    event = {"at": 10.0, "kind": "fault", "fault": "slow-store=0.6s@10s", "did": "so"}
    run = _run(tmp_path, [event], [100.0] * 10 + [60.0] * 20, calm=99)
    (incident,) = find_incidents(
        _with_looks(run, *({"stall": 0.0},) * 10, *({"stall": stall},) * 20)
    )
    assert incident.result == result
    assert ("no change needed" in incident.sentence) is (result == "the input keeps up")


FAULT = {"kind": "fault", "fault": "cores=1@20s", "did": "1 core instead of 4"}


@pytest.mark.parametrize(
    ("measured", "gain"),
    [
        ([effect(21.0)], "before the first fault of the run, after one change."),
        ([effect(10.0, rates=(100.0, 101.0))], "one change brought no measurable gain"),
    ],
    ids=["measured after a fault", "no more rows"],
)
def test_a_change_that_was_not_measured_to_help_is_credited_with_nothing(tmp_path, measured, gain):
    changed = decided(6.5)
    rates = [5.0] * 3 + [190.0] * 3 + [200.0] * 14 + [50.0] * 20
    run = _run(tmp_path, [changed, {"at": 20.0, **FAULT}, *measured], rates, calm=20)
    headline = Story.of(run).sentences[0]
    assert "→" not in headline
    assert gain in headline
    assert "before tuning" not in page.write(tmp_path).read_text()


def test_the_start_is_no_part_of_what_was_before_a_change(tmp_path):
    changed = decided(6.5)
    run = _run(tmp_path, [changed, effect(10.0)], [5.0] * 5 + [100.0] + [200.0] * 20)
    assert Story.of(run).outcome.rows_per_s_first == 100.0


def test_the_headline_of_a_resumed_run_is_of_its_last_part(tmp_path):
    starts = [{"at": at, "kind": "start"} for at in (0.0, 60.5)]
    rates = [100.0] * 60 + [50.0] * 6
    story = Story.of(_run(tmp_path, [*starts, {"at": 10.0, **FAULT}], rates))
    outcome, told = story.outcome, story.explanation
    assert (outcome.rows_per_s_settled, outcome.rows_per_s_last) == (50.0, 50.0)
    assert_names(told, "50 rows/s", "in the last third of part 2 of 2", "from 1 min on")
    assert "After the faults" not in told, "the fault was in the part before"
    assert_names(page.page(story), "Trainer waits, last third of part 2 of 2 (from 1 min on)</dt>")


def test_each_line_is_in_the_part_whose_start_came_before_it_and_the_first_one_has_what_came_earlier(
    tmp_path,
):
    run = _run(tmp_path, [{"at": at, "kind": "start"} for at in (1.5, 3.0)], [1.0] * 4)
    assert [[look["at"] for look in part.looks()] for part in run.parts()] == [[1, 2], [3, 4]]


def test_the_rates_of_a_part_are_those_of_its_own_ranks(tmp_path):
    config = {"kind": "train", "ranks": 1}
    starts = [{"at": 0.0, "kind": "start", "ranks": 2}, {"at": 60.5, "kind": "start", "ranks": 1}]
    run = _run(tmp_path, starts, [100.0] * 62, config)
    assert {look["rows_per_s"] for look in run.looks()[:60]} == {200.0}
    assert {look["rows_per_s"] for look in run.looks()[60:]} == {100.0}


def test_the_headline_is_of_the_part_before_the_first_fault(tmp_path):
    changed = decided(6.5)
    end = {"auc": 0.8, "samples_per_s": 60.0, "stall_fraction": 0.5}
    rates = [100.0] * 6 + [100.0, 180.0] + [200.0] * 12 + [50.0] * 20
    run = _run(
        tmp_path,
        [changed, effect(10.0), {"at": 20.0, **FAULT}, decided(30.0, 2)],
        rates,
        config={"kind": "train", "ranks": 2},
        calm=20,
    )
    outcome = Story.of(run, end).summary
    with open(tmp_path / "events.jsonl", "a") as events:
        events.write(json.dumps({"at": 40.0, "kind": "end", **end}) + "\n")
    story = Story.read(tmp_path)
    assert story.summary == outcome, "before the last event and after it"
    assert_names(
        outcome["headline"], "50 % → 10 %", "7 s", "2 times", "200 → 400 rows/s", "one change"
    )
    assert (outcome["rows_per_s_settled"], outcome["decisions"]) == (400.0, 2)
    assert outcome["changes_settling"] == 1
    (incident,) = outcome["incidents"]
    assert (incident["before"], incident["after"], incident["result"]) == (
        400.0,
        100.0,
        "limited by the cores",
    )
    text = page.write(tmp_path).read_text()
    for where in (text, story.explanation):
        assert_names(
            where, outcome["headline"], incident["sentence"], "last third before the first fault"
        )
    assert_names(text, ">400<small>200 before tuning", ">10 %<small>50 % before tuning")


def test_what_passes_during_an_evaluation_is_no_dip(tmp_path):
    run = _run(tmp_path, [{**CORES, "at": 10.0}], [100.0] * 30)
    away = {"rows_per_s": 0.0, "stall": 0.0, "away": 1.0}
    evaluated = _with_looks(run, *(away if 24 < at < 29 else {} for at in range(1, 31)))
    assert find_incidents(evaluated) == find_incidents(run)
    assert Story.of(evaluated).outcome.rows_per_s_settled == 100.0


def test_each_ends_where_the_next_begins_and_the_report_marks_them(tmp_path):
    run = _run(
        tmp_path,
        [
            {**CORES, "at": 5.0},
            decided(7.0),
            {
                "at": 15.0,
                "kind": "follow",
                "before": 0,
                "after": 1,
                "added": ["C17"],
                "dropped": ["C9"],
            },
        ],
        [100.0] * 30,
    )
    first, second = find_incidents(run)
    assert (first.did, second.did) == (("decode 1 → 2",), ())
    assert_names(second.text, "version 1", "C17", "C9")
    text = page.write(tmp_path).read_text()
    bands = json.loads(re.search(r'class="moments">(.*?)</script>', text)[1])["bands"]
    assert [(band["label"], band["from"], band["to"]) for band in bands] == [
        ("A", 5.0, 5.0),
        ("B", 15.0, 15.0),
    ], "there was no dip"
    assert f"B. {second.sentence}" in text
