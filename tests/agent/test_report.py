"""The page and the explanation of invented runs: complete, empty, interrupted, resumed, long."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest

from sluice.agent import __main__ as agent
from sluice.agent.report import charts, figures
from sluice.agent.report import page as report
from sluice.agent.report.charts import decimate
from sluice.agent.report.incidents import SMALL_STALL
from tests.agent.fake import FakePipeline, FakeStage, tune
from tests.agent.grown_run import decided, effect, written
from tests.product import RunError, RunFolder, Story, count, percent
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

LOOK = {"kind": "loader", "rows": 1, "rows_per_s": 1000.0, "stall": 0.5}


@pytest.fixture
def told(tmp_path):
    """Returns the story of a run with these lines, one a second unless they say when."""
    numbers = itertools.count()

    def told(*lines):
        timed = ({"at": float(at), **line} for at, line in enumerate(lines, 1))
        return Story.of(written(tmp_path / f"told {next(numbers)}", *timed))

    return told


def _looks(*stalls, **more):
    return [{**LOOK, "stall": stall, **more} for stall in stalls]


def data_of(text, kind):
    """What is embedded for the page's script: of each chart (kind ``), or what happened when (`moments`)."""
    return [
        json.loads(content)
        for content in re.findall(
            rf'<script type="application/json" class="{kind}">(.*?)</script>', text
        )
    ]


def _tuned_run(path, end=True):
    pipeline = FakePipeline(
        [FakeStage(name="decode", cpu_s=0.002, wait_s=0.1), FakeStage(name="collate", cpu_s=0.001)],
        cores=4,
        step_s=0.004,
    )
    config = {"bayes_auc": 0.81, "note": "<script>alert(1)</script> & more", "<b>bold</b>": 1}
    pipeline.advance(1.0)  # its first rows have come
    with RunFolder.create(path, config, clock=lambda: pipeline.now) as folder:
        folder.event({"kind": "start"})

        def observe(seen):
            folder.metric(seen)
            folder.metric({"kind": "train", "loss": 0.6})

        controller, _ = tune(pipeline, 40, record=folder.event, observe=observe)
        folder.metric({"kind": "eval", "epoch": 0, "split": "validation", "auc": 0.77})
        controller.stop()
        if end:
            folder.event({"kind": "end"})
    return controller.decisions


def test_the_page_opens_offline_and_marks_every_decision(tmp_path):
    decisions = _tuned_run(tmp_path / "run")
    text = report.write(tmp_path / "run").read_text()
    assert decisions >= 2
    assert not re.search(r"(https?:)?//[a-z]|<(link|img|iframe)|\b(src|href)=", text)
    (moments,), figures = data_of(text, "moments"), data_of(text, "")
    assert [decision["label"] for decision in moments["decisions"]] == [
        str(n + 1) for n in range(decisions)
    ]
    assert len(figures) == 8
    rates, waits = figures[0]["panels"]
    assert {series["name"]: series["style"] for series in rates["series"]} == {
        "taken by the trainer": "area",
        "possible without waiting": "limit",
        "with one worker a stage": "level",
    }
    assert [series["name"] for series in waits["series"]] == ["waiting"]
    assert_names(text, "decode is the bottleneck", "&lt;script&gt;")
    assert not re.search("<b>bold|NaN", text)


@pytest.mark.parametrize(
    ("stall", "facts"),
    [
        (0.04, ["trainer was the bottleneck", "4.0 %"]),
        (0.5, ["last third of the run", "input was the bottleneck", "50 %"]),
    ],
)
def test_a_little_waiting_does_not_make_the_input_the_bottleneck(told, stall, facts):
    assert_names(told(*_looks(*9 * [stall])).verdict, *facts)


@pytest.mark.parametrize(
    ("busy", "stall", "is_marked"),
    [(0.9, 0.5, True), (0.89, 0.5, False), (1.0, SMALL_STALL, False), (1.0, 0.11, True)],
)
def test_a_busy_stage_is_the_bottleneck_of_a_trainer_that_waits(told, busy, stall, is_marked):
    of_stage = {
        "knobs": {"workers": {"decode": 1}},
        "stages": {"decode": {"workers": 1, "busy": busy}},
    }
    story = told(*_looks(*9 * [stall], **of_stage))
    story = replace(story, outcome=replace(story.outcome, stall_last=stall))
    assert ("the bottleneck" in figures.stages(story)) is is_marked


def test_page_and_explanation_show_the_same_waiting_and_rates(told):
    """The end of the run waited longer than its last third; the agent's model predicts ten times the rate."""
    case = {"rows_per_s": 1e4, "workers": {"decode": 2}}
    cases = {"as it is": case, "twice the cores": {**case, "rows_per_s": 2.9e6}}
    end = {"rows_per_s": 1000, "stall_fraction": 0.5, "peak_bytes": 3 * 2**30}
    story = told(
        *_looks(*30 * [0.5], *3 * [0.9], memory_used=2**30, memory_limit=2**33),
        {"kind": "verdict", "text": "all is well", "details": {"what_if": cases}},
        {"kind": "end", **end, "memory": {"limit": 2**32}},
    )
    explained, page = story.explanation, report.write(story.run.path).read_text()
    summary = story.summary
    waits = percent(summary["stall_settled"])
    assert waits == "61 %"
    assert summary["stall_last"] == summary["stall_settled"]
    assert summary["rows_per_s_last"] == summary["rows_per_s_settled"] == 1000
    for where in (explained, page):
        assert set(re.findall(r"([\d.]+ %)[^0-9%]*\btime\b", where)) == {waits}
    assert_names(explained, "twice the cores", "290 times", "290 k rows/s", "decode 2")
    assert (summary["peak_memory"], summary["memory_limit"]) == (3 * 2**30, 2**32)
    assert "3 GiB<small>of 4 GiB" in page


def _started(rates):
    return [{**LOOK, "rows_per_s": rate, "stall": 0.25 if rate else 1.0} for rate in rates]


def test_a_run_is_judged_by_what_came_after_its_start(told):
    end = {"kind": "end", "samples_per_s": 950.0, "stall_fraction": 0.2}
    short = [*_started([0.0, 0.0, 120.0, 1000.0]), end]
    verdict = told(*short).verdict
    assert_names(verdict, "Too short", "950 rows/s", "20 %")
    assert "bottleneck" not in verdict
    nothing = {**end, "samples_per_s": 0.0, "stall_fraction": 0.0}  # the same command once more
    assert told(*short, nothing).verdict == verdict
    outcome = told(*_started([0.0, 0.0, 120.0, *3 * [1e3]])).outcome
    assert (outcome.rows_per_s_first, outcome.rows_per_s_settled, outcome.stall_first) == (
        1e3,
        1e3,
        0.25,
    )


def test_the_explanation_begins_with_what_tuning_changed(tmp_path):
    _tuned_run(tmp_path / "run")
    story = Story.read(tmp_path / "run")
    verdict = story.verdict
    assert re.search(r"9\d % → 0(\.\d)? %.*2\d times", verdict), verdict
    assert_names(verdict, "trainer was the bottleneck", "AUC 0.7700", "0.8100")
    explained = story.explanation
    assert explained.startswith(verdict)
    assert re.search(
        r"1\. at [\d.]+ s: decode 1 → \d+.*\n.*why: .*decode.*rows/s expected.*\n.*effect: \d+ times",
        explained,
    )


@pytest.mark.parametrize(
    ("seen", "facts"),
    [
        ({"late": {"others": 0.4, "input": 0.6}}, ["waited 40 %", "rank 3 on host1", "60 %"]),
        ({"slow": {"times": 2.3}}, ["Rank 3 on host1 computes 2.3 times as long", "median"]),
    ],
    ids=["waited for", "slow"],
)
def test_a_rank_that_holds_the_others_up_is_named(told, seen, facts):
    run = told(*_looks(*9 * [0.25])).run
    ((kind, values),) = seen.items()

    def verdict(*ranks):
        trained = [
            {"kind": "train", "at": 4.0, **({kind: {"rank": rank, "host": "host1", **values}})}
            for rank in ranks
        ]
        brief = [{"kind": "train", "at": 2.0}]
        return Story.of(replace(run, metrics=(*run.metrics, *brief, *trained))).verdict

    assert_names(verdict(3, 3), *facts)
    assert "host1" not in verdict()
    if kind == "slow":
        assert "host1" not in verdict(0, 1, 1, 2, 3), "now this rank, now that"


def test_a_run_with_nothing_in_it_still_has_a_page(told):
    assert_names(report.page(told()), "Nothing is measured")
    ended = told({"kind": "end"})
    assert "no loader metrics" in report.page(ended)
    assert "No decision was made." in ended.explanation


@pytest.mark.parametrize(
    ("looks", "facts"),
    [
        (
            _looks(0.5, held_back=0, held_back_pressure=0)
            + _looks(0.5, held_back=12, held_back_pressure=4),
            ["memory 12 times", "8 for the limit", "4 because the system"],
        ),
        (
            _looks(
                0.5,
                0.5,
                elsewhere={
                    "workers": 5,
                    "bytes": 3 * 2**30,
                    "retries": 4,
                    "hedges": 1,
                    "core_s": 1234.5,
                },
            ),
            ["3 GiB", "1,234 core-seconds", "4 requests"],
        ),
    ],
    ids=["held back", "remote workers"],
)
def test_what_work_waited_for_and_what_remote_workers_cost_is_shown(told, looks, facts):
    memory = {"memory_used": 2**30, "memory_limit": 2**31}
    assert_names(report.page(told(*({**look, **memory} for look in looks))), *facts)


@pytest.mark.parametrize(
    ("headline", "lead", "more"),
    [
        ("fast", "fast", ""),
        ("fast, 0.7 % waiting, good", "fast", "0.7 % waiting, good"),
        ("25.2 k rows/s. Too short: <3", "25.2 k rows/s", "Too short: &lt;3"),
    ],
)
def test_a_headline_is_cut_after_its_first_part(headline, lead, more):
    page = report.filled(title="t", name="n", headline=headline, rest="", footer="")
    assert f"<strong>{lead}</strong>{more}</" in page


def test_faults_and_an_interrupted_run_are_shown(tmp_path):
    _tuned_run(tmp_path / "run", end=False)
    with RunFolder.create(tmp_path / "run", {}, resume=True) as folder:
        folder.event({"kind": "fault", "text": "the knobs stay <as they are>"})
        text = report.write(folder.path).read_text()  # while the run goes on
    assert_names(text, "the knobs stay &lt;as they are&gt;", "has not ended")


def test_warnings_of_the_run_are_on_its_page_once(told):
    warning = {"kind": "warning", "step": 9, "text": "AUC 0.53 is no better than <chance>"}
    page = report.page(told(*_looks(*9 * [0.25]), warning, warning))
    assert page.count("no better than &lt;chance&gt;") == 1
    assert "<h2>Warnings</h2>" in page


def test_thousands_of_points_stay_a_small_page_and_keep_their_peaks(told):
    points = [(float(i), float(i == 7777)) for i in range(20_000)]
    assert len(decimate(points)) <= charts.MOST_POINTS + 2
    assert (7777.0, 1.0) in decimate(points)
    train = ({"kind": "train", "loss": i % 7, "step": i} for i in range(20_000))
    assert len(report.page(told(*train))) < 60_000


@pytest.mark.parametrize(
    ("text", "value"), [("1 k", 999.7), ("1 M", 999_700.0), ("999", 999.4), ("18.5 k", 18_549.0)]
)
def test_a_count_is_rounded_before_its_unit_is_chosen(text, value):
    assert count(value) == text


def test_the_program_ends_with_its_line(tmp_path):
    _tuned_run(tmp_path / "run")

    for command in ("report", "explain"):
        assert agent.main([command, str(tmp_path / "run")])["auc"] == 0.77
    assert (tmp_path / "run" / "report.html").exists()
    with raises(RunError, "no run folder"):
        agent.main(["report", str(tmp_path)])


def test_explain_predicts_other_resources_and_shows_its_error(tmp_path):
    """A store-bound pipeline on 2 cores: the transform's processor time bounds it in the end."""
    stages = [
        FakeStage(name="decode", cpu_s=0.002, wait_s=0.05),
        FakeStage(name="transform", cpu_s=0.004),
    ]
    with RunFolder.create(tmp_path / "run", {}) as folder:
        tune(FakePipeline(stages), 30, record=folder.event, observe=folder.metric)[0].stop()
    text = Story.read(tmp_path / "run").explanation
    for pattern in (
        r"twice the cores: (1\.9|2) times",
        r"half the cores: 0\.5\d? times",
        "twice the memory: the same",
        r"decode: 5[12](\.\d)? µs",
        r"Prediction error .*median [\d.]+ %",
    ):
        assert re.search(pattern, text), pattern


def test_an_effect_is_not_compared_across_a_disturbance(told):
    """With the effect of the first change came other cores; only what is predicted of the second counts."""
    cores = {"kind": "incident", "what": "cores", "text": "the cores at hand went from 2 to 0.5"}
    dearer = {"kind": "incident", "what": "workload", "text": "a row became 14 times dearer"}
    story = told(
        *(decided(10.0), {**cores, "at": 11.0}, effect(14.0, error=-0.75)),
        *(decided(20.0, 2), effect(24.0, 2, rates=(100.0, 50.0), error=-0.375)),
        *({**dearer, "at": 56.0}, decided(60.0, 3), effect(67.0, 3)),
        {"kind": "verdict", "text": "done", "at": 70.0},
    )
    first, second, third = story.changes
    assert_names(first.effect, "not comparable", "from 2 to 0.5")
    assert second.effect.startswith("0.5 times")
    assert second.result == "slower"
    assert third.result == "not comparable", "the rate before was that of full buffers"
    assert_names(story.explanation, "one change: median 38 %")
