"""The page and the explanation of invented runs: complete, empty, interrupted, resumed, long."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sluice.agent.controller import Controller
from sluice.agent.policies import make
from sluice.agent.report import charts, narrative
from sluice.agent.report import page as report
from sluice.agent.report.charts import decimate
from sluice.agent.report.format import count, moves, percent
from sluice.agent.report.run_folder import Run, RunFolder, read_lines
from tests.agent import grown_run
from tests.agent.fake import FakePipeline, FakeStage
from tests.raises import assert_names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Fails on tags that are not closed; collects tags with their attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def count(self, tag, kind):
        return sum(
            t == tag and kind in (attrs.get("class") or "").split() for t, attrs in self.tags
        )

    @property
    def figures(self):
        return [attrs["aria-label"] for tag, attrs in self.tags if attrs.get("class") == "plot"]


def data_of(text, kind):
    """What is embedded for the page's script: of each chart (kind ``), or what happened when (`moments`)."""
    return [
        json.loads(one)
        for one in re.findall(
            rf'<script type="application/json" class="{kind}">(.*?)</script>', text
        )
    ]


def page_of(path):
    return report.page(Run.read(path))


def _tuned_run(path, ticks=40, end=True):
    pipeline = FakePipeline(
        [FakeStage(name="read", cpu_s=0.002, wait_s=0.1), FakeStage(name="collate", cpu_s=0.001)],
        cores=4,
        step_s=0.004,
    )
    plan = {
        "C1": {"sharding": "row_wise", "rows": 1000},
        "C2": {"sharding": "table_wise", "rows": 10},
    }
    config = {
        "data": "tables/criteo",
        "bayes_auc": 0.81,
        "plan": plan,
        "note": "<script>alert(1)</script> & more",
        "<b>bold</b>": 1,
    }
    pipeline.advance(1.0)  # its first rows have come
    with RunFolder.create(path, config, clock=lambda: pipeline.now) as folder:
        folder.event({"kind": "start"})
        controller = Controller(
            pipeline,
            make("planner"),
            record=folder.event,
            observe=folder.metric,
            clock=lambda: pipeline.now,
        )
        for tick in range(ticks):
            controller.step()
            pipeline.advance(1.0)
            folder.metric(
                {
                    "kind": "train",
                    "step": tick,
                    "epoch": 0,
                    "loss": 0.7 - 0.002 * tick,
                    "stall": 0.1,
                }
            )
        folder.metric(
            {"kind": "eval", "epoch": 0, "split": "validation", "auc": 0.77, "ne": 0.8, "rows": 10}
        )
        controller.stop()
        if end:
            folder.event({"kind": "end"})
    return controller.decisions


def test_the_page_is_whole_offline_and_marks_every_decision(tmp_path):
    decisions = _tuned_run(tmp_path / "run")
    path = report.write(tmp_path / "run")
    text = path.read_text()
    page = Page(text)
    assert decisions >= 2
    assert not re.search(r"(https?:)?//[a-z]", text)
    assert not [
        t for t, a in page.tags if t in ("link", "img", "iframe") or "src" in a or "href" in a
    ]
    assert page.figures == [
        "Rows a second, and waiting for input",
        "read",
        "collate",
        "Training loss",
        "AUC",
        "Memory",
        "Buffers",
        "Cores",
    ]
    (moments,), charts_data = data_of(text, "moments"), data_of(text, "")
    assert [one["label"] for one in moments["decisions"]] == [str(n + 1) for n in range(decisions)]
    assert len(charts_data) == len(page.figures)
    (level,) = [one for one in charts_data[0]["panels"][0]["series"] if one["style"] == "level"]
    assert level["name"] == "with one worker a stage"
    assert page.count("tr", "decision") == decisions
    assert "read is the bottleneck" in text
    assert "row_wise" in text
    assert "&lt;script&gt;" in text
    assert "<b>bold" not in text
    assert "NaN" not in text


@pytest.mark.parametrize(
    ("stall", "facts"),
    [
        (0.01, ["trainer was the bottleneck"]),
        (0.04, ["trainer was the bottleneck", "4.0 %"]),
        (0.5, ["last third of the run", "input was the bottleneck", "50 %"]),
    ],
)
def test_a_little_waiting_does_not_make_the_input_the_bottleneck(tmp_path, stall, facts):
    lines = [
        {"kind": "loader", "at": float(at), "rows_per_s": 1000.0, "stall": stall} for at in range(9)
    ]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_names(narrative.verdict(Run.read(tmp_path)), *facts)


def test_page_and_explanation_show_the_same_waiting_and_rates(tmp_path):
    """The end of the run waited longer than its last third; the agent's model predicts ten times the rate."""
    case = {"rows_per_s": 1e4, "workers": {"read": 2}}
    cases = {"as it is": case, "twice the cores": {**case, "rows_per_s": 3e4}}
    with RunFolder.create(tmp_path / "run", {"kind": "bench"}) as folder:
        for number in range(33):
            folder.metric(
                {
                    "kind": "loader",
                    "rows": 1,
                    "rows_per_s": 1000.0,
                    "stall": 0.9 if number > 29 else 0.5,
                    "memory_used": 2**30,
                    "memory_limit": 2**33,
                }
            )
        folder.event({"kind": "verdict", "text": "all is well", "details": {"what_if": cases}})
        folder.event(
            {
                "kind": "end",
                "rows_per_s": 1000,
                "stall_fraction": 0.5,
                "peak_bytes": 3 * 2**30,
                "memory": {"limit": 2**32},
            }
        )
    run = Run.read(tmp_path / "run")
    explained, page = narrative.tell(run), report.write(run.path).read_text()
    found = narrative.summary(run)
    waits = percent(found["stall_settled"])
    assert waits == "61 %"
    assert found["stall_last"] == found["stall_settled"]
    assert found["rows_per_s_last"] == found["rows_per_s_settled"] == 1000
    for where in (explained, page):
        assert set(re.findall(r"([\d.]+ %)[^0-9%]*\btime\b", where)) == {waits}
    assert_names(explained, "twice the cores", "3 times", "3 k rows/s", "read 2")
    assert (found["peak_memory"], found["memory_limit"]) == (3 * 2**30, 2**32)
    assert "3 GiB<small>of 4 GiB" in page


def test_after_faults_the_rest_is_judged_by_its_own_looks(tmp_path):
    with RunFolder.create(tmp_path / "run", {}, clock=iter(range(100)).__next__) as folder:
        for number in range(40):
            folder.metric(
                {
                    "kind": "loader",
                    "rows": 1,
                    "rows_per_s": 1000.0,
                    "stall": 0.1 if number < 20 else 0.6,
                }
            )
            if number == 19:
                folder.event({"kind": "fault", "fault": "cores=1@19s", "did": "so"})
    found = narrative.outcome(Run.read(tmp_path / "run"))
    assert (found.stall_settled, found.stall_last) == (pytest.approx(0.1), pytest.approx(0.6))
    verdict = narrative.verdict(Run.read(tmp_path / "run"))
    assert_names(verdict, "before the first fault", "faults", "input was the bottleneck", "60 %")


def _looked_at(path, rates, end=None):
    path.mkdir()
    lines = [
        {
            "kind": "loader",
            "at": float(at),
            "rows": 1,
            "rows_per_s": rate,
            "stall": 0.25 if rate else 1.0,
        }
        for at, rate in enumerate(rates, 1)
    ]
    (path / "config.json").write_text("{}")
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "events.jsonl").write_text(
        json.dumps({"kind": "end", "at": 9.0, **end}) + "\n" if end else ""
    )
    return Run.read(path)


def test_a_run_is_judged_by_what_came_after_its_start(tmp_path):
    whole = {"samples_per_s": 950.0, "stall_fraction": 0.2}
    verdict = narrative.verdict(_looked_at(tmp_path / "short", [0.0, 0.0, 120.0, 1000.0], whole))
    assert_names(verdict, "Too short", "950 rows/s", "20 %")
    assert "bottleneck" not in verdict
    with open(
        tmp_path / "short" / "events.jsonl", "a"
    ) as events:  # the same command once more: nothing left to train
        events.write(
            json.dumps({"kind": "end", "at": 12.0, "samples_per_s": 0.0, "stall_fraction": 0.0})
            + "\n"
        )
    assert narrative.verdict(Run.read(tmp_path / "short")) == verdict
    found = narrative.outcome(
        _looked_at(tmp_path / "enough", [0.0, 0.0, 120.0, 1000.0, 1000.0, 1000.0])
    )
    assert (found.rows_per_s_first, found.rows_per_s_settled, found.stall_first) == (
        1000.0,
        1000.0,
        0.25,
    )


def test_a_change_during_the_start_shows_the_rate_after_it(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.event(
            {
                "kind": "decision",
                "sequence": 1,
                "before": {},
                "after": {},
                "reason": {"text": "why not"},
            }
        )
        folder.event(
            {
                "kind": "effect",
                "sequence": 1,
                "rows_per_s_before": None,
                "rows_per_s_after": 2000.0,
                "stall_before": None,
                "stall_after": 0.5,
                "prediction_error": None,
            }
        )
    assert_names(narrative.tell(Run.read(tmp_path / "run")), "effect: 2 k rows/s", "stall 50 %")


def test_the_explanation_begins_with_what_tuning_changed(tmp_path):
    _tuned_run(tmp_path / "run")
    verdict = narrative.verdict(Run.read(tmp_path / "run"))
    assert re.search(r"9\d % → 0(\.\d)? % .*2\d times", verdict), verdict
    assert_names(verdict, "trainer was the bottleneck", "AUC 0.7700", "0.8100")
    explained = narrative.tell(Run.read(tmp_path / "run"))
    assert explained.startswith(verdict)
    assert re.search(
        r"1\. at 1 s: read 1 → \d+\n.*why: .*read.*\n.*effect: 1[2-6](\.\d)? times", explained
    )


def test_a_rank_that_the_others_wait_for_is_named(tmp_path):
    run = _looked_at(tmp_path / "run", [1000.0] * 9)
    late = {"rank": 3, "host": "host1", "others": 0.4, "input": 0.6}
    trained = [{"kind": "train", "at": at, "late": late} for at in (4.0, 6.0)]
    brief = {"kind": "train", "at": 2.0}
    verdict = narrative.verdict(replace(run, metrics=(*run.metrics, brief, *trained)))
    assert_names(verdict, "waited 40 %", "rank 3 on host1", "60 %")
    for few in ((), (brief, brief, trained[0])):
        assert "rank" not in narrative.verdict(replace(run, metrics=(*run.metrics, *few)))


def test_a_rank_that_computes_for_longer_than_the_others_is_named(tmp_path):
    run = _looked_at(tmp_path / "run", [1000.0] * 9)
    slow = {"rank": 3, "host": "host1", "times": 2.3}
    trained = [{"kind": "train", "at": at, "slow": slow} for at in (4.0, 6.0)]
    brief = {"kind": "train", "at": 2.0}
    verdict = narrative.verdict(replace(run, metrics=(*run.metrics, brief, *trained)))
    assert_names(verdict, "Rank 3 on host1 computes 2.3 times as long", "median")
    now_and_then = [{**trained[0], "slow": {**slow, "rank": rank}} for rank in (0, 1, 1, 2, 3)]
    for few in ((brief, brief, trained[0]), now_and_then):
        assert "host1" not in narrative.verdict(replace(run, metrics=(*run.metrics, *few)))


def test_each_start_of_a_run_is_left_out_of_its_rates():
    looks = [
        {"rows": rows, "rows_per_s": rate, **more}
        for rows, rate, more in (
            (0, 0.0, {}),
            (50, 50.0, {"began": True}),
            (150, 100.0, {}),
            (0, 0.0, {}),
            (30, 30.0, {"began": True}),
            (130, 100.0, {}),
            (130, 0.0, {}),
        )
    ]  # the last one waited in the middle of the run
    assert [look["rows_per_s"] for look in narrative.started(looks)] == [100.0, 100.0, 0.0]


def test_a_run_with_nothing_in_it_still_has_a_page(tmp_path):
    RunFolder.create(tmp_path / "run", {}).close()
    page = Page(report.write(tmp_path / "run").read_text())
    assert page.figures == []
    assert "Nothing is measured" in "".join(page.text)
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.event({"kind": "end"})
    assert "no loader metrics" in report.write(tmp_path / "run").read_text()
    assert "No decision was made." in narrative.tell(Run.read(tmp_path / "run"))


@pytest.mark.parametrize("kind", ["loader", "train", "eval"])
def test_one_kind_of_metric_alone_is_enough(tmp_path, kind):
    lines = {
        "loader": {"rows_per_s": 10.0, "stall": 0.5, "rows": 1},
        "train": {"loss": 0.5},
        "eval": {"auc": 0.7},
    }
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.metric({"kind": kind, **lines[kind]})
    assert Page(report.write(tmp_path / "run").read_text()).figures


def test_a_run_whose_every_look_has_an_evaluation_in_it_is_drawn_by_these(tmp_path):
    """As it is where epochs are short or the machine is busy."""
    with RunFolder.create(tmp_path / "run", {}) as folder:
        for _ in range(3):
            folder.metric(
                {"kind": "loader", "rows": 1, "rows_per_s": 10.0, "stall": 0.5, "away": 0.5}
            )
    text = report.write(tmp_path / "run").read_text()
    (hero,) = data_of(text, "")[:1]
    assert [len(panel["series"][0]["at"]) for panel in hero["panels"]] == [3, 3]


def test_work_that_waited_for_memory_is_shown_with_its_reasons(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        for held_back, pressed in ((0, 0), (12, 4)):
            folder.metric(
                {
                    "kind": "loader",
                    "rows": 1,
                    "rows_per_s": 10.0,
                    "stall": 0.5,
                    "memory_used": 2**30,
                    "memory_limit": 2**31,
                    "held_back": held_back,
                    "held_back_pressure": pressed,
                }
            )
    text = report.write(tmp_path / "run").read_text()
    assert_names(text, "memory 12 times", "8 for the limit", "4 because the system")


def test_remote_workers_are_drawn_with_their_costs(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        for workers in (2, 5):
            folder.metric(
                {
                    "kind": "loader",
                    "rows": 1,
                    "rows_per_s": 10.0,
                    "stall": 0.5,
                    "elsewhere": {
                        "workers": workers,
                        "bytes": 3 * 2**30,
                        "retries": 4,
                        "hedges": 1,
                        "core_s": 1234.5,
                    },
                }
            )
    text = report.write(tmp_path / "run").read_text()
    assert_names(text, "3 GiB", "1,234 core-seconds", "4 requests")
    assert [2, 5] in [
        panel["series"][0]["value"] for figure in data_of(text, "") for panel in figure["panels"]
    ]


def test_faults_and_an_interrupted_run_are_shown(tmp_path):
    _tuned_run(tmp_path / "run", end=False)
    with RunFolder.create(tmp_path / "run", {}, resume=True) as folder:
        folder.event({"kind": "fault", "text": "the knobs stay <as they are>"})
    text = report.write(tmp_path / "run").read_text()
    assert "the knobs stay &lt;as they are&gt;" in text
    assert "has not ended" in text


def test_warnings_of_the_run_are_on_its_page_once(tmp_path):
    run = _looked_at(tmp_path / "run", [1000.0] * 9)
    text = "AUC 0.53 is no better than <chance>"
    for events in (1, 2):
        with open(run.path / "events.jsonl", "a") as file:
            file.write(json.dumps({"kind": "warning", "at": 3.0, "step": 9, "text": text}) + "\n")
        page = page_of(run.path)
        assert page.count("no better than &lt;chance&gt;") == 1, events
        assert_names(page, "<h2>Warnings</h2>", "one warning")
    Page(page)


def test_two_periods_are_never_given_without_their_names(tmp_path):
    """Planted: the last third waits 25 %, the whole run 40 %, and the agent saw 13.2 % at its last looks."""
    run = _looked_at(tmp_path / "run", [1000.0] * 9, {"rows_per_s": 900.0, "stall_fraction": 0.4})
    seen = {"kind": "verdict", "at": 9.0, "text": "the trainer is the bottleneck (13.2 %)"}
    with open(run.path / "events.jsonl", "a") as file:
        file.write(json.dumps({**seen, "details": {"stages": {}, "what_if": {}}}) + "\n")
    run = Run.read(run.path)
    lines = narrative.last_lines(narrative.summary(run))
    assert_names(lines[0], "1 k rows/s", "25 %", "in the last third of the run")
    assert lines[1].startswith("Whole run: 900 rows/s, 40 %")
    told = narrative.tell(run)
    assert "In the last third of the run, the input was the bottleneck" in told
    assert "from its last looks alone: the trainer is the bottleneck (13.2 %)" in told
    assert "the cost of a stage was not measured" in told


def test_effects_find_their_decision_after_a_resume_that_counts_anew(tmp_path):
    knobs = [{"workers": {"read": n}} for n in (1, 2, 3)]
    with RunFolder.create(tmp_path / "run", {}, clock=iter(range(100)).__next__) as folder:
        for before, after, rows in ((knobs[0], knobs[1], 20.0), (knobs[1], knobs[2], 30.0)):
            folder.event(
                {
                    "kind": "decision",
                    "sequence": 1,
                    "before": before,
                    "after": after,
                    "reason": {"text": "so"},
                }
            )
            folder.event(
                {
                    "kind": "effect",
                    "sequence": 1,
                    "rows_per_s_before": 10.0,
                    "rows_per_s_after": rows,
                    "stall_before": 1.0,
                    "stall_after": 0.5,
                }
            )
    first, second = narrative.changes(Run.read(tmp_path / "run"))
    assert first.effect.startswith("2 times")
    assert second.effect.startswith("3 times")
    assert (first.number, second.number) == (1, 2)


def test_thousands_of_points_stay_a_small_page_and_keep_their_peaks(tmp_path):
    points = [(float(i), float(i == 7777)) for i in range(20_000)]
    assert len(decimate(points)) <= charts.MOST_POINTS + 2
    assert (7777.0, 1.0) in decimate(points)
    with RunFolder.create(tmp_path / "run", {}) as folder:
        for i in range(20_000):
            folder.metric({"kind": "train", "loss": i % 7, "step": i})
    assert report.write(tmp_path / "run").stat().st_size < 60_000


def test_waiting_has_one_colour_on_all_pages(tmp_path):
    _tuned_run(tmp_path / "tuned")
    with RunFolder.create(tmp_path / "left alone", {}) as folder:
        for _ in range(9):
            folder.metric({"kind": "loader", "rows": 1, "rows_per_s": 1000.0, "stall": 0.5})
    colours = [
        re.findall(r'<li class="(c\d) area"><i></i>waiting', report.page(Run.read(tmp_path / run)))
        for run in ("tuned", "left alone")
    ]
    assert len(colours[0]) == 1
    assert colours[0] == colours[1]


def test_no_share_is_above_all_there_is(tmp_path):
    """Two clocks make a stall of 100.04 %; three times the prediction is no percentage."""
    text = page_of(grown_run.write(tmp_path / "run", 60.0, looks=60, decisions=3))
    assert (
        max(
            value
            for panel in data_of(text, "")[0]["panels"][1:]
            for value in panel["series"][0]["value"]
        )
        <= 1
    )
    assert not [share for share in re.findall(r"([\d.]+) %", text) if float(share) > 100]
    assert "2.7 times" in text


def test_a_long_run_is_folded_and_its_sentences_stay_short(tmp_path):
    text = page_of(grown_run.write(tmp_path / "run", 600.0, looks=200, decisions=40, faults=3))
    assert re.search(r"<summary>40 in all: .*faster", text)
    assert re.search(r"then \d+ more changes, then", text)
    assert Page(text).count("tr", "decision") == 40


@pytest.mark.parametrize(
    ("text", "value"), [("1 k", 999.7), ("1 M", 999_700.0), ("999", 999.4), ("18.5 k", 18_549.0)]
)
def test_a_count_is_rounded_before_its_unit_is_chosen(text, value):
    assert count(value) == text


def test_the_program_ends_with_its_line(tmp_path):
    _tuned_run(tmp_path / "run")
    for command in ("report", "explain"):
        done = subprocess.run(
            [sys.executable, "-m", "agent", command, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        assert json.loads(done.stdout.splitlines()[-1])["auc"] == 0.77
    assert (tmp_path / "run" / "report.html").exists()
    wrong = subprocess.run(
        [sys.executable, "-m", "agent", "report", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert wrong.returncode == 2
    assert "no run folder" in wrong.stderr
    usage = subprocess.run(
        [sys.executable, "-m", "agent", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "examples:" in usage.stdout


def test_a_page_can_be_made_while_the_run_goes_on(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.metric({"kind": "train", "loss": 0.5})
        assert report.write(folder.path).exists()
        assert len(read_lines(folder.path / "metrics.jsonl")) == 1


def _story_of(folder, pipeline, policy, *, looks):
    """The explanation of a run in which the policy tuned the pipeline."""
    with RunFolder.create(folder, {}) as run:
        controller = Controller(
            pipeline, make(policy), record=run.event, observe=run.metric, clock=lambda: pipeline.now
        )
        for _ in range(looks):
            controller.step()
            pipeline.advance(1.0)
        controller.stop()
    return narrative.tell(Run.read(folder))


def test_explain_predicts_other_resources_and_shows_its_error(tmp_path):
    """A store-bound pipeline on 2 cores: the transform's processor time bounds it in the end."""
    stages = [
        FakeStage(name="read", cpu_s=0.002, wait_s=0.05),
        FakeStage(name="transform", cpu_s=0.004),
    ]
    pipeline = FakePipeline(stages)
    text = _story_of(tmp_path / "run", pipeline, "planner", looks=30)
    assert re.search(r"twice the cores: (1\.9|2) times", text)
    assert re.search(r"half the cores: 0\.5\d? times", text)
    assert "twice the memory: the same" in text
    assert re.search(r"read: 5[12](\.\d)? µs", text)
    assert re.search(r"Prediction error .*median [\d.]+ %", text)


def test_explain_shows_what_a_shadow_would_have_done(tmp_path):
    pipeline = FakePipeline(
        [FakeStage(name="read", cpu_s=0.002, wait_s=0.05), FakeStage(name="collate", cpu_s=0.001)]
    )
    text = _story_of(tmp_path / "run", pipeline, "shadow", looks=10)
    assert "No decision" in text
    why = re.search(r"read 1 → 16\n +why: (.*)", text)[1]
    assert (
        f"last verdict, from its last looks alone: {why}.\n" in text
    )  # no other figures than when it was proposed
    assert re.search(r"twice the cores: .* \(read", text)
    assert "rows/s (read" not in text


def test_a_link_with_the_name_of_a_draft_is_not_followed(tmp_path):
    """Drafts had a known name, so that the file behind such a link was overwritten."""
    folder = RunFolder.create(tmp_path / "run", {"kind": "train"})
    folder.close()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / "report.new").symlink_to(tmp_path / "mine")
    assert "<html" in report.write(tmp_path / "run").read_text()
    assert (tmp_path / "mine").read_text() == "mine"


def _grown(number):
    """The decision of that number: one reader more."""
    return {
        "kind": "decision",
        "sequence": number,
        "before": {"workers": {"read": number}},
        "after": {"workers": {"read": number + 1}},
        "reason": {"text": "more"},
    }


def test_an_effect_is_not_compared_across_a_disturbance(tmp_path):
    """With the effect of the first change came other cores; only what is predicted of the second counts."""
    clock = [0.0]
    with RunFolder.create(tmp_path / "run", {}, clock=lambda: clock[0]) as folder:

        def change(number, at, occasion=None):
            clock[0] = at
            folder.event(_grown(number))
            if occasion:
                clock[0] = at + 1
                folder.event(occasion)
            clock[0] = at + 4
            folder.event(
                {
                    "kind": "effect",
                    "sequence": number,
                    "rows_per_s_before": 100.0,
                    "rows_per_s_after": 50.0,
                    "stall_before": 1.0,
                    "stall_after": 1.0,
                    "prediction_error": -0.75 / number,
                }
            )

        change(
            1,
            10.0,
            {"kind": "occasion", "what": "cores", "text": "the cores at hand went from 2 to 0.5"},
        )
        change(2, 20.0)
        folder.event({"kind": "verdict", "text": "done"})
    run = Run.read(tmp_path / "run")
    first, second = narrative.changes(run)
    assert_names(first.effect, "not comparable", "from 2 to 0.5")
    assert second.effect.startswith("0.5 times")
    assert_names(narrative.tell(run), "one change: median 38 %")


def test_a_change_after_a_slower_store_is_not_compared_with_the_rate_of_full_buffers(tmp_path):
    clock = [0.0]
    with RunFolder.create(tmp_path / "run", {}, clock=lambda: clock[0]) as folder:
        for number, at, what in ((1, 20.0, "workload"), (2, 60.0, "")):
            clock[0] = at - 4
            if what:
                text = "a row became 14 times dearer in read"
                folder.event({"kind": "occasion", "what": what, "text": text})
            clock[0] = at
            folder.event(_grown(number))
            clock[0] = at + 7
            folder.event(
                {
                    "kind": "effect",
                    "sequence": number,
                    "rows_per_s_before": 100.0,
                    "rows_per_s_after": 80.0,
                    "stall_before": 0.1,
                    "stall_after": 0.3,
                    "prediction_error": None,
                }
            )
    first, second = narrative.changes(Run.read(tmp_path / "run"))
    assert first.result == "not comparable"
    assert second.result == "slower"


def test_fusing_and_splitting_a_stage_are_moves():
    alone, fused = {"workers": {"f": 1}, "fused": []}, {"workers": {"f": 1}, "fused": ["f"]}
    assert_names(moves(alone, fused), "f", "before it")
    assert_names(moves(fused, alone), "f", "its own")
    assert moves(fused, fused) == "nothing"
