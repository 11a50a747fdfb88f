"""What leaving the planner's choice came to: what is compared, how it corrects a bound, and that a run keeps it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.policies import make
from sluice.agent.policies.auto import PRICE, Auto
from sluice.agent.policies.learned.candidates import KINDS
from sluice.agent.policies.learned.residual import MOST, TRIAL_S, GainTrial, Residual
from sluice.agent.policies.planner.planner import MEMORY_ALARM, Planner
from sluice.agent.runtime.settled_knobs import Here, Registry, RegistryEntry
from sluice.agent.simulator.rollout import run
from sluice.agent.simulator.scenario_json import shipped
from sluice.ingest.knobs import Knobs
from tests.agent.judges import Judge
from tests.agent.walk import walk

SCENARIOS = {s.name[:2]: s for s in shipped()}
BEFORE, CHOSEN, OTHER = (Knobs(workers={"read": n}) for n in (1, 2, 3))


def _seen(rows_per_s, *, stall=1.0, seconds=1.0):
    return PipelineRates(seconds=seconds, rows_per_s=rows_per_s, stall=stall, demand_rows_per_s=None, cpu=1.0,
                         cpu_quota=2.0,
                         memory_used=1, memory_limit=2, stages={})


def _trial(**values):
    return GainTrial(**{"kind": "probe", "foretold": 0.1, "rows_per_s": 100.0, "knobs": (BEFORE, CHOSEN), **values})


def _came(came, foretold=0.0):
    """A trial at its end."""
    return _trial(foretold=foretold, seconds=TRIAL_S, missing=-came * 100 * TRIAL_S)


def _after(*residuals):
    found = Residual()
    for one in residuals:
        found = found.learn(_came(one))
    return found


def test_what_came_is_the_rows_over_those_that_the_planners_choice_would_have_brought():
    trial = _trial()
    for knobs, rows in ((CHOSEN, 50), (CHOSEN, 70), (BEFORE, 100), (BEFORE, 110)):  # taken back after two looks
        trial = trial.after(_seen(rows, seconds=5.0), knobs)
    assert trial.seconds == TRIAL_S
    assert trial.missing == pytest.approx(5 * (50 + 30 + 0 - 10))
    assert trial.came == pytest.approx(-350 / (100 * TRIAL_S))


def test_rows_that_the_trainer_did_not_wait_for_are_not_missing():
    assert _trial().after(_seen(0, stall=0.0), CHOSEN).missing == 0, "it evaluates"
    assert _trial().after(_seen(60, stall=0.25), CHOSEN).missing == pytest.approx(25)


def test_what_the_planner_gains_by_another_change_is_not_to_its_credit_but_what_is_missing_counts():
    assert _trial().after(_seen(150), CHOSEN).missing == -50
    assert _trial().after(_seen(150), OTHER).missing == 0
    assert _trial().after(_seen(70), OTHER).missing == 30


def test_a_trial_needs_rows_to_compare_with():
    with pytest.raises(ValueError, match="rows_per_s: 0"):
        _trial(rows_per_s=0)


def test_known_answers():
    assert Residual().correction == pytest.approx(-0.1 / 2), "not tried: what is foretold must exceed what is uncertain"
    once = _after(-0.2)
    assert (once.tries, once.mean, once.scatter) == pytest.approx((1, -0.2, 0))
    spread = math.sqrt(4 * 0.01 / 5)
    assert once.correction == pytest.approx(-0.2 + spread**2 / 0.2 - spread / math.sqrt(5))
    both = _after(0.1, 0.3)
    assert (both.tries, both.mean) == pytest.approx((1.9, (0.9 * 0.1 + 0.3) / 1.9))
    assert both.scatter == pytest.approx(0.9 * (both.mean - 0.1) ** 2 + (0.3 - both.mean) ** 2)


def test_what_lies_within_its_error_moves_nothing_and_what_is_clear_moves_either_way():
    assert _after(0.05, -0.05).correction < 0
    assert _after(0.05).correction == pytest.approx(_after(-0.05).correction), "that may be chance"
    assert _after(*[-0.2] * 5).correction < -0.2
    assert 0.1 < _after(*[0.2] * 5).correction < 0.2
    assert _after(0.6, -0.2, 0.6, -0.2).correction < _after(*[0.2] * 4).correction, "the same mean, and scattered"


def test_it_is_learned_of_both_directions_and_never_by_more_than_most():
    assert Residual().learn(_came(-0.9, foretold=0.2)).mean == -MOST
    assert Residual().learn(_came(3.0)).mean == MOST
    assert Residual().learn(_came(0.1, foretold=0.3)).mean == pytest.approx(-0.2)


def test_the_old_is_forgotten_within_a_run_and_from_run_to_run():
    turned = _after(*[-0.2] * 20, *[0.2] * 12)
    assert turned.correction > 0
    assert turned.tries < 10
    shut, runs = _after(-0.2, -0.2, -0.2), 0
    while 0.15 + shut.correction <= 0:
        shut, runs = shut.aged(), runs + 1
    assert 1 <= runs <= 8, "some day it is tried again"


@pytest.mark.parametrize("values", [
    {"tries": -1.0}, {"tries": 11.0}, {"tries": math.nan}, {"mean": 0.6}, {"mean": "0.1"}, {"scatter": math.inf},
    {"scatter": True}, {"scatter": -0.1}])
def test_what_is_no_residual_is_refused_by_name(values):
    name, value = next(iter(values.items()))
    with pytest.raises(ValueError, match=f"{name}: {value!r} is not a number from"):
        Residual(**values)


class Deaf(Auto):
    """Learns nothing from what came."""

    def _bound(self, candidate, state):
        return self._judge.lower_bound(candidate)


def _walk(policy, scenario, ticks, residuals=()):
    """With what is known of kinds already."""
    return walk(policy, scenario, ticks, lambda state: dataclasses.replace(state, residuals=dict(residuals)))


def test_a_kind_that_is_promised_too_much_of_is_left_alone_after_a_few_tries():
    """Beside a neighbour, more workers than the planner wants take rows away."""
    scenario = dataclasses.replace(SCENARIOS["08"], seconds=160, changes=())
    planner, tries, rows = run(scenario, make("planner")).rows, {}, {}
    for policy in (Auto, Deaf):
        left = []
        outcome = run(scenario, policy(judge=Judge("probe", 0.2)), observe=lambda _, __, r, left=left: left.append(
            "left" in r.details))
        tries[policy], rows[policy] = sum(left), outcome.rows / planner
    assert 1 <= tries[Auto] <= 3
    assert tries[Deaf] > 3 * tries[Auto]
    assert rows[Auto] >= 1 - PRICE
    assert rows[Auto] > rows[Deaf]


@pytest.mark.parametrize(("number", "kind"), [("02", "hold"), ("09", "probe")])
def test_it_is_held_against_what_the_planner_hoped_for_or_else_the_rows_before(number, kind):
    snapshot, state, trial = next((snapshot, state.planner, after.trial) for snapshot, state, _, after, _ in _walk(
        Auto(judge=Judge(kind, 0.2)), SCENARIOS[number], 30) if after.left)
    wanted, _, reason = Planner().decide(snapshot, state)
    before = rates((*state.window, state.last)[0], snapshot).rows_per_s
    if kind == "hold":
        assert wanted != state.knobs
        assert trial.rows_per_s == reason.predicted_rows_per_s > before
    else:
        assert wanted == state.knobs
        assert trial.rows_per_s == before


def test_a_kind_that_brings_more_than_was_foretold_is_taken_where_it_was_not():
    shy, good = Auto(judge=Judge("probe", -0.05)), {"probe": _after(*[0.3] * 4)}
    assert not any(after.left for *_, after, _ in _walk(shy, SCENARIOS["09"], 8))
    assert any(after.left for *_, after, _ in _walk(shy, SCENARIOS["09"], 8, good))


def test_however_good_it_was_the_shield_stands_above():
    good = {kind: _after(*[MOST] * 10) for kind in KINDS}
    keen = Auto(judge=Judge("probe", 0.2))
    snapshot, state = next((snapshot, state) for snapshot, state, _, after, _ in _walk(keen, SCENARIOS["09"], 8, good)
                           if after.left)

    def left(snapshot=snapshot, **changed):
        return keen.decide(snapshot, dataclasses.replace(state, **changed))[1].left

    assert left() == 1
    assert left(dataclasses.replace(snapshot, memory_used=int(snapshot.memory_limit * (MEMORY_ALARM + 0.01)))) == 0
    assert left(cost_rows=1.01 * PRICE * snapshot.rows) == 0
    assert left(trial=_trial()) == 0, "one at a time, so that what came can be put down to it"


def test_a_shut_gate_stays_shut_and_keeps_what_an_open_one_learned():
    shut, good = make("auto"), {kind: _after(*[MOST] * 10) for kind in KINDS}
    *_, (_, _, _, after, _) = _walk(shut, SCENARIOS["09"], 30, good)
    assert after.left == 0
    assert after.residuals == good


def test_the_event_of_a_change_tells_what_was_foretold_and_the_next_one_what_came():
    told = [reason for _, state, knobs, _, reason in _walk(Auto(judge=Judge("probe", 0.2)), SCENARIOS["09"], 60)
            if knobs != state.planner.knobs]
    first = next(r for r in told if "left" in r.details)
    assert first.details["foretold"] == 0.2
    assert first.details["residual"] == Residual().correction
    assert first.details["bound"] == pytest.approx(0.2 + Residual().correction)
    came = next(r for r in told if "came" in r.details)
    assert came.details["came"]["left"] == "probe"
    assert came.details["came"]["residual"] == pytest.approx(came.details["came"]["came"] - 0.2)
    assert "where +20% was foretold" in came.text
    assert sum(r.details.get("came") == came.details["came"] for r in told) == 1, "once"


def test_nothing_is_learned_on_another_share_of_the_machine_but_what_is_missing_counts():
    keen = Auto(judge=Judge("probe", 0.2))
    *_, (snapshot, state, *_) = _walk(keen, SCENARIOS["09"], 8)
    assert state.trial is not None
    rate = state.trial.rows_per_s
    for tick in range(1, 2 + round(TRIAL_S)):
        done = snapshot.rows + int(tick * rate / 4)
        now = dataclasses.replace(snapshot, at=snapshot.at + tick, sequence=snapshot.sequence + tick, rows=done,
                                  cpu_quota=snapshot.cpu_quota / 2, consumer_wait_s=snapshot.consumer_wait_s + tick)
        state, known = keen.decide(now, state)[1], state
        if state.trial is None:
            break
        assert state.trial.rows_per_s == rate / 2
        assert state.left == 1, "one at a time, all the same"
    assert tick >= TRIAL_S - 5
    assert (state.residuals, state.known) == ({}, None)
    assert state.cost_rows == pytest.approx(known.cost_rows + rate / 4, rel=0.01), "a quarter of it came"


HERE = Here(machine="a machine", schema="a schema", row_bytes=100.0)


def _kept(tmp_path, learned, capsys):
    """What the next run knows, by way of the registry, and what was said meanwhile."""
    scenario, said = SCENARIOS["09"], []
    registry = Registry(tmp_path, say=said.append)
    assert registry.remember(RegistryEntry(here=HERE, knobs=scenario.limits.clamp(scenario.first_knobs), rows_per_s=1.0,
                                           learned=learned))
    entry = registry.recall(HERE, scenario.limits)
    policy = Auto(judge=Judge("probe", 0.2))
    state = policy.recall(policy.initial(scenario.limits, scenario.first_knobs), entry.learned)
    return policy, state, said, capsys.readouterr().err


def test_the_next_run_on_that_machine_and_schema_starts_with_it(tmp_path, capsys):
    first = Auto(judge=Judge("probe", 0.2))
    *_, (*_, after, _) = _walk(first, SCENARIOS["09"], 60)
    assert after.residuals["probe"].tries >= 1
    policy, state, said, err = _kept(tmp_path, first.learned(after), capsys)
    assert state.residuals == {"probe": after.residuals["probe"].aged()}
    assert state.planner.services.keys() == after.planner.services.keys()
    assert (said, err) == ([], "")
    assert policy.explain(state)["residuals"]["probe"]["correction"] == state.residuals["probe"].correction


@pytest.mark.parametrize(("residuals", "lines"), [
    (None, 1), ([], 1), ({"probe": 3}, 1), ({"probe": {"tries": -1}}, 1), ({"probe": {"weight": 1}}, 1),
    ({"probe": {"mean": math.nan}}, 1), ({"a kind of a later version": {"weight": 1}}, 0), ({}, 0)])
def test_one_that_is_damaged_is_none_in_a_line_and_what_the_planner_knew_stays(tmp_path, capsys, residuals, lines):
    policy = Auto(judge=Judge("probe", 0.2))
    *_, (*_, after, _) = _walk(policy, SCENARIOS["09"], 10)
    learned = {**policy.learned(after), "residuals": residuals}
    _, state, said, err = _kept(tmp_path, learned, capsys)
    assert state.residuals == {}
    assert any(service.points for service in state.planner.services.values())
    assert (len(said), err.count("\n")) == (0, lines), err


def test_an_older_entry_has_none_and_nothing_is_said(tmp_path, capsys):
    policy = Auto(judge=Judge("probe", 0.2))
    *_, (*_, after, _) = _walk(policy, SCENARIOS["09"], 10)
    _, state, said, err = _kept(tmp_path, make("planner").learned(after.planner), capsys)
    assert (state.residuals, said, err) == ({}, [], "")
