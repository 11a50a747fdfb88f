"""One choice at every look: its candidates, the value that decides, what is recorded, and the labels that teach it."""

import itertools
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from sluice.agent import policies
from sluice.agent.choice.candidates import list_candidates
from sluice.agent.choice.choice import Chooser, caution_after
from sluice.agent.choice.effect import Effects
from sluice.agent.choice.value import NETWORKS, SHAPES, Value, ValueNetwork, answer
from sluice.agent.controller import Controller
from sluice.agent.lab import labels, value_teacher
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario_json import shipped
from sluice.agent.policies.planner.state import WorkerCap
from sluice.agent.report import looks
from sluice.agent.report.narrative import tell
from sluice.agent.report.run_folder import Run, RunFolder
from sluice.agent.runtime.foreknowledge import foreknowledge
from tests.agent.fake import FakePipeline, FakeStage
from tests.agent.policy_contract import PolicyContract

STAGES = [
    FakeStage(name="decode", cpu_s=0.002, wait_s=0.05),
    FakeStage(name="bid", cpu_s=0.004),
    FakeStage(name="collate", cpu_s=0.001),
]


class Likes:
    """Gives some candidates a value, and all others none."""

    digest, caution = "likes", 1.0

    def __init__(self, **values):
        self.likes, self.seen = values, []

    def values(self, seen, candidates):
        self.seen.append((seen, candidates))
        return [Value(*self.likes.get(candidate.name, (0.0, 0.0))) for candidate in candidates]


class Turns(Likes):
    """Likes one candidate at each of the first looks, and then nothing."""

    def __init__(self, *turns):
        super().__init__()
        self.turns = turns

    def values(self, seen, candidates):
        self.likes = dict.fromkeys(self.turns[len(self.seen) :][:1], (0.5, 0.0))
        return super().values(seen, candidates)


def _run(values, seconds, pipeline=None, **more):
    pipeline, events = pipeline or FakePipeline(STAGES), []
    how = {"record": events.append, "clock": lambda: pipeline.now, **more}
    controller = Controller(pipeline, Chooser(values), **how)
    until = pipeline.now + seconds
    while pipeline.now < until - 1e-6:
        controller.step()
        pipeline.advance(controller.wait_s)
    controller.stop()
    assert controller.frozen is None, controller.frozen
    return pipeline, controller, [e for e in events if e["kind"] == "decision"]


def test_the_best_lower_estimate_is_chosen_and_recorded_with_all_others():
    values = Likes(most=(0.5, 0.1), planner=(0.6, 0.4))
    pipeline, controller, decisions = _run(values, 0.4)
    assert pipeline.knobs.workers["decode"] > 10, "the planner's proposal is too unsure"
    (decision,) = decisions
    assert (decision["chosen_by"], decision["chosen"]) == ("network", "most")
    told = {
        candidate["name"]: (candidate["value"], candidate["spread"])
        for candidate in decision["candidates"]
    }
    assert told["stay"] == (0.0, 0.0)
    assert "chose workers for the most rows (+50 %)" in decision["reason"]["text"]
    assert "the planner's proposal (+60 %)" in decision["reason"]["text"]
    assert (controller.choices, controller.own_choices) == (1, 1)


def test_the_agent_dares_more_the_longer_nothing_changes():
    def caution(age, changes=0, at=20.0, event=None):
        state = types.SimpleNamespace(tick=100.0, age=age)
        effects = Effects(changes=(at,) * changes, event=event)
        return caution_after(0.5, types.SimpleNamespace(state=state, effects=effects))

    assert caution(3) == 0.5
    assert caution(3) > caution(8)
    assert caution(10_000) == -1.0, "no more than the spread is hoped for"
    assert caution(8, changes=3) == 0.5, "it waits longer after changes"
    assert caution(3, changes=3, event=30.0) == 0.0, "after an event, a gain is enough"
    assert caution(8, changes=3, at=96.0, event=95.0) == 0.5, "until a change was tried"


def test_it_stays_where_nothing_is_worth_more_and_says_so_at_every_look():
    recorded = []
    pipeline, controller, _ = _run(
        Likes(planner=(-0.3, 0.1), most=(-0.1, 0.0)), 5, looks=recorded.append
    )
    assert not pipeline.applied
    assert controller.choices == sum("choice" in line for line in recorded) > 3
    assert all(line["choice"]["chosen"] == "stay" for line in recorded if "choice" in line)


def test_an_event_is_remembered_though_the_agent_stays():
    values = Likes()
    run(shipped()[5], Chooser(values))
    seen = values.seen[-1][0]
    assert seen.state.changed == {"transform"}
    assert seen.effects.event >= 160


def test_a_trainer_that_never_waits_leaves_nothing_to_choose():
    values, fed = Likes(most=(1.0, 0.0)), FakePipeline(STAGES, step_s=0.1)
    fed.advance(1.0)
    pipeline, controller, _ = _run(values, 5, fed)
    assert not pipeline.applied
    assert controller.choices == 0


def test_candidates_differ_and_fit_into_memory():
    values = Likes()
    stages = [replace(stage, item_bytes=2**26) for stage in STAGES]
    _run(values, 5, FakePipeline(stages, workers={"decode": 4}, memory_limit=3 * 2**30))
    assert values.seen
    for seen, candidates in values.seen:
        assert candidates[0].name == "stay"
        settings = [candidate.knobs for candidate in candidates]
        assert all(settings.count(knobs) == 1 for knobs in settings)
        most = max(seen.forecast.most_bytes, seen.forecast.memory(seen.knobs))
        assert all(seen.forecast.memory(k) <= most for k in settings if k != seen.proposal)
        mostly = seen.forecast.memory(seen.knobs) + 0.5 * seen.forecast.free_bytes
        shaped = [
            candidate.knobs
            for candidate in candidates
            if candidate.name in ("lean", "double", "most")
        ]
        assert all(seen.forecast.memory(knobs) <= mostly for knobs in shaped)
        near = {candidate.name: candidate.knobs.workers for candidate in candidates}
        assert near["more"]["decode"] == seen.knobs.workers["decode"] + 2
        assert near["less"]["decode"] == seen.knobs.workers["decode"] - 2


def test_no_candidate_asks_more_of_a_store_that_has_refused_requests():
    values, refused = Likes(), itertools.count()
    pipeline = FakePipeline(STAGES, workers={"decode": 4})
    snapshot = pipeline.snapshot
    pipeline.snapshot = lambda: replace(snapshot(), throttled=min(next(refused), 2))
    _run(values, 12, pipeline)
    assert any(len(candidates) > 1 for _, candidates in values.seen)
    for seen, candidates in values.seen:
        assert seen.recent.seconds <= 7, "older looks are forgotten"
        assert all(
            candidate.knobs.workers["decode"] <= seen.knobs.workers["decode"]
            for candidate in candidates
        )


@pytest.mark.parametrize(("cap", "reached"), [(5, 5), (6, 6), (4, 4), (2, 4)])
def test_candidates_reach_the_cap_of_a_store_and_none_passes_it(cap, reached):
    """Four workers ask now. They stay also if the cap is lower."""
    values = Likes()
    _run(values, 12, FakePipeline(STAGES, workers={"decode": 4}))
    seen = next(seen for seen, listed in values.seen if len(listed) > 3)
    free = max(candidate.knobs.workers["decode"] for candidate in list_candidates(seen))
    assert free > 6, "without a cap, more are worth a try"
    capped = replace(seen.state, caps={"decode": WorkerCap(1, cap, seen.state.tick + 1)})
    asking = [c.knobs.workers["decode"] for c in list_candidates(replace(seen, state=capped))]
    assert max(asking) == reached
    over = replace(seen.state, caps={"decode": WorkerCap(1, cap, seen.state.tick)})
    after = list_candidates(replace(seen, state=over))
    assert max(candidate.knobs.workers["decode"] for candidate in after) == free


def test_a_process_that_does_not_fit_is_ended_while_it_starts_and_one_known_fits_twice():
    values = Likes(processes=(0.5, 0.0))
    outcome = run(pipeline("hidden", 760528), Chooser(values), seed=760528)
    assert any(outcome.changed)
    assert not outcome.killed
    seen = values.seen[0][0]
    size = 0.55 * seen.forecast.free_bytes
    costs = {name: replace(cost, process_bytes=size) for name, cost in seen.forecast.costs.items()}
    forecast = replace(seen.forecast, costs=costs)
    weighed = list_candidates(replace(seen, forecast=forecast))
    assert not {"processes", "backend"} & {candidate.name for candidate in weighed}


@pytest.mark.parametrize("number", [760033, 760068])
def test_a_candidate_moves_each_stage_once(number):
    values, offered = Likes(), set()
    run(replace(pipeline("hidden", number), seconds=10), Chooser(values), seed=number)
    for seen, candidates in values.seen:
        computing = {
            name
            for name, stage in seen.recent.stages.items()
            if seen.state.limits.movable(name, "thread")
            and stage.cpu >= 0.1 * seen.recent.running
            and name not in seen.unmeasured
        }
        for candidate in candidates:
            offered.add(candidate.name)
            moved = {name for name, kind in candidate.knobs.backend.items() if kind == "process"}
            assert candidate.name != "processes" or moved == computing
        # The lock is free, or another stage computes nearly all.
        other = replace(seen.recent.stages["stage1"], cpu=1e3)
        for change in ({"lock": 0.05}, {"lock": 0.4, "stages": {**seen.recent.stages, "": other}}):
            listed = list_candidates(replace(seen, recent=replace(seen.recent, **change)))
            assert not {"processes", "backend"} & {candidate.name for candidate in listed}
    assert "processes" in offered


def test_the_best_setting_so_far_is_a_candidate():
    values = Turns("most", "less", "less")
    _run(values, 8)
    last = {candidate.name: candidate.knobs for candidate in values.seen[-1][1]}
    fastest = max(values.seen[-1][0].effects.settings, key=lambda effect: effect.rows_per_s)
    assert fastest.knobs != last["stay"]
    assert fastest.knobs in last.values()


def test_what_a_loader_knows_before_its_first_row_reaches_the_network():
    far = FakePipeline([FakeStage(name="fetch"), FakeStage(name="decode")])
    assert foreknowledge(far).store == "remote"


def test_a_run_folder_keeps_the_choices_and_explain_counts_them(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        how = {"record": folder.event, "observe": folder.metric, "looks": folder.look}
        _run(Likes(most=(0.3, 0.0)), 3, **how)
    assert "1 of 1 changes were the network's own choices." in tell(Run.read(tmp_path / "run"))
    (start,) = looks.read(tmp_path / "run")
    first, *later = [look.choice["chosen"] for look in start.looks if look.choice]
    assert first == "most"
    assert set(later) <= {"stay"}


@pytest.mark.parametrize("number", [5, 6])
def test_forks_have_the_same_events(number):
    scenario = labels.scenario_of(number) or labels.scenario_of(number + 2)
    assert scenario is not None
    simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs, seed=3)
    simulator.advance(2.0)
    copied = labels.fork(simulator)
    copied.advance(5.0)
    again = labels.fork(simulator)
    again.advance(5.0)
    simulator.advance(5.0)
    assert copied.snapshot() == again.snapshot() == simulator.snapshot()


def test_labels_are_shares_and_a_shard_is_made_once(tmp_path):
    policy = Chooser(Likes())
    path = tmp_path / "shard.npz"
    count = labels.label_shard(path, range(4), policy)
    made = labels.read_looks([path])
    assert len(made) == count > 0
    for look in made:
        assert look.rows.max() == 1
        assert look.rows.min() >= -1
        assert look.given.candidates.shape[0] == look.given.changes.shape[0] == len(look.rows)
    before = path.stat().st_mtime_ns
    assert labels.label_shard(path, range(4), policy) == count
    assert path.stat().st_mtime_ns == before


def _drawn_inputs(draw, stages, candidates):
    shapes = (stages, 25), (31,), (candidates, stages, 5), (candidates, 28)
    return labels.LookInputs(*(draw.standard_normal(size).astype(np.float32) for size in shapes))


def test_staying_has_no_gain_and_the_order_of_stages_does_not_count():
    draw = np.random.default_rng(0)
    weights = {
        name: draw.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()
    }
    given = _drawn_inputs(draw, 4, 3)
    gains, spreads = answer(weights, given)
    assert gains[0] == spreads[0] == 0
    assert (spreads[1:] > 0).all()
    turned = labels.LookInputs(
        given.stages[::-1], given.pipeline, given.changes[:, ::-1], given.candidates
    )
    assert answer(weights, turned)[0] == pytest.approx(gains, abs=1e-4)


@pytest.mark.parametrize("turns", [["most"], ["most", "more"]])
def test_changes_that_have_lost_rows_are_undone_together(turns):
    pipeline = FakePipeline(
        [replace(STAGES[0], bend=lambda n: 1.0 if n < 10 else 40.0), *STAGES[1:]]
    )
    _run(Turns(*turns), 40, pipeline)
    workers = [knobs.workers["decode"] for knobs in pipeline.applied]
    assert workers[0] >= 10 > workers[-1]


def test_the_teacher_computes_the_same_values_and_learns_which_candidate_is_better():
    draw = np.random.default_rng(1)

    def look(number):
        given = _drawn_inputs(draw, draw.integers(2, 6), draw.integers(2, 5))
        promised = given.candidates[:, 8] = draw.random(len(given.candidates))
        return labels.LabelledLook(given, 0.5 + 0.5 * (promised - promised.max()), 0, number)

    made = [look(number) for number in range(120)]
    weights, record = value_teacher.teach_values(made, epochs=80, seed=0)
    batch = value_teacher._Batches(made).tensors
    torch_weights = {name: torch.from_numpy(array) for name, array in weights.items()}
    mean = sum(
        value[..., 0] - value[:, :1, 0]
        for value in (value_teacher._value(torch_weights, n, batch) for n in range(NETWORKS))
    )
    for i, labelled in enumerate(made):
        gains, _ = answer(weights, labelled.given)
        assert gains == pytest.approx(mean[i, : len(gains)].numpy() / NETWORKS, abs=1e-4)
    untaught = value_teacher.judge(value_teacher.fresh(5), made, 0.0)
    taught = value_teacher.judge(weights, made, 0.0)
    assert taught.gain > untaught.gain + 0.3 * (taught.best - untaught.gain)
    assert record["looks"] == 120
    assert record["caution"] in (0.0, 0.25, 0.5, 1.0, 2.0)


def untaught():
    """A policy that `make` finds by its name."""
    return Chooser(ValueNetwork(value_teacher.fresh(1), {"caution": 0.0}))


@pytest.mark.parametrize("name", ["choice"])
class TestContract(PolicyContract):
    """A network that was never taught breaks nothing."""

    @pytest.fixture(autouse=True)
    def _known(self, monkeypatch):
        monkeypatch.setitem(policies.PRODUCT, "choice", f"{__name__}:untaught")
