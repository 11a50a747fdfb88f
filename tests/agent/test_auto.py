"""`auto`: what it is offered, when it leaves the planner's choice, what stands above, and weights that are none."""

from __future__ import annotations

import dataclasses
import json
import struct

import numpy as np
import pytest

from sluice.agent.policies import make
from sluice.agent.policies.auto import PRICE, Auto
from sluice.agent.policies.learned.advantage import FORMAT, MEMBERS, NEVER, SHAPES, Advantage, WeightsError, load
from sluice.agent.policies.learned.candidates import KINDS, STAGE_INPUTS, WHOLE_INPUTS, candidates
from sluice.agent.policies.planner.planner import MEMORY_ALARM, Planner
from sluice.agent.simulator.rollout import run
from sluice.agent.simulator.scenario_json import shipped
from tests.agent.judges import Judge
from tests.agent.walk import walk

SCENARIOS = {s.name[:2]: s for s in shipped()}


def test_the_first_candidate_is_the_planners_choice_and_the_others_differ_and_fit():
    planner, kinds = Planner(), set()
    for snapshot, state, knobs, _, reason in walk(planner, SCENARIOS["06"], 60):
        found = candidates(planner, snapshot, state)
        assert (found[0].kind, found[0].knobs, found[0].reason) == ("planner", knobs, reason)
        assert len({str(one.knobs) for one in found}) == len(found)
        for one in found:
            SCENARIOS["06"].limits.check(one.knobs)
            assert one.stages.shape[1] == STAGE_INPUTS
            assert one.whole.shape == (WHOLE_INPUTS,)
            assert np.isfinite(one.stages).all()
            assert np.isfinite(one.whole).all()
        kinds |= {one.kind for one in found}
    assert {"planner", "hold", "half", "probe"} <= kinds <= set(KINDS)


def test_while_a_change_of_the_planners_is_on_trial_there_are_no_others():
    """They would be begun from what it had not judged yet, and nobody would take that back."""
    planner, trials = Planner(), 0
    for snapshot, state, *_ in walk(planner, SCENARIOS["06"], 12):
        trials += state.trial is not None
        assert state.trial is None or len(candidates(planner, snapshot, state)) == 1
    assert trials > 0


def test_a_bound_below_zero_is_the_planner_to_the_row():
    scenario = dataclasses.replace(SCENARIOS["06"], seconds=60)
    shy = Auto(judge=Judge("hold", bound=0.0))
    assert run(scenario, shy).rates == run(scenario, make("planner")).rates


def test_a_bound_above_zero_leaves_it_says_so_and_the_change_is_on_trial_like_any_other():
    left = [(state, after, knobs, reason) for _, state, knobs, after, reason in
            walk(Auto(judge=Judge("probe")), SCENARIOS["09"], 9) if after.left > state.left]
    state, after, knobs, reason = left[0]
    assert "left the planner's choice (probe)" in reason.text
    assert reason.details["left"] == "probe"
    assert after.planner.knobs == knobs != state.planner.knobs
    assert after.planner.trial.kind == "probe"


def test_what_leaving_costs_has_a_limit():
    """Whatever a judge promises: once it has cost too much, the planner decides until that is a small part again."""
    costs = [(state.cost_rows, after.cost_rows, after.left - state.left, snapshot.rows)
             for snapshot, state, _, after, _ in walk(Auto(judge=Judge("switch", bound=9.0)), SCENARIOS["13"], 120)]
    assert sum(left for *_, left, _ in costs) >= 1
    assert any(after > PRICE * rows > 0 for _, after, _, rows in costs)
    assert all(after <= PRICE * rows for _, after, left, rows in costs if left)


def test_nothing_is_tried_while_memory_is_short():
    keen = Auto(judge=Judge("probe"))
    snapshot, state = next((snapshot, state) for snapshot, state, _, after, _ in walk(keen, SCENARIOS["09"], 9)
                           if after.left)
    assert keen.decide(snapshot, state)[1].left > state.left
    short = dataclasses.replace(snapshot, memory_used=int(snapshot.memory_limit * (MEMORY_ALARM + 0.01)))
    assert keen.decide(short, state)[1].left == state.left


def test_deciding_is_pure():
    keen = Auto(judge=Judge("probe"))
    for snapshot, state, knobs, after, reason in walk(keen, SCENARIOS["06"], 12):
        assert keen.decide(snapshot, state) == (knobs, after, reason)


def _weights(**changed):
    found = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return {**found, **changed}


def _file(path, tensors, metadata):
    from safetensors.numpy import save_file

    save_file(tensors, path, metadata=metadata)
    return path


def test_the_lower_bound_is_the_mean_less_spread_and_margin():
    advantage = Advantage(_weights(last_bias=np.arange(MEMBERS, dtype=float), caution=np.array([2.0, 0.25])))
    _, one, *_ = candidates(Planner(), *_some_moment())
    members = np.arange(MEMBERS)
    assert advantage.of(one) == pytest.approx(members)
    assert advantage.lower_bound(one) == pytest.approx(members.mean() - 2 * members.std() - 0.25)


def _some_moment():
    *_, (snapshot, state, *_) = walk(Planner(), SCENARIOS["09"], 5)
    return snapshot, state


def _broken(path):
    good = _file(path / "good", _weights(), {"format": FORMAT}).read_bytes()
    header = json.loads(good[8:8 + struct.unpack("<Q", good[:8])[0]])
    assert header["__metadata__"] == {"format": FORMAT}
    return {
        "absent": None, "empty": b"", "nonsense": b"nonsense" * 9, "cut off": good[:len(good) // 2],
        "foreign": _file(path / "f", {"weight": np.zeros(3, np.float32)}, {"format": FORMAT}).read_bytes(),
        "another shape": _file(path / "s", _weights(last_bias=np.zeros(2, np.float32)),
                               {"format": FORMAT}).read_bytes(),
        "not finite": _file(path / "n", _weights(caution=np.array([np.nan, 0], np.float32)),
                            {"format": FORMAT}).read_bytes(),
        "newer": _file(path / "w", _weights(), {"format": "2"}).read_bytes(),
        "no format": _file(path / "m", _weights(), {}).read_bytes(),
    }


def test_weights_that_cannot_be_used_are_told_in_one_line_and_auto_is_the_planner(tmp_path, capsys):
    scenario = dataclasses.replace(SCENARIOS["09"], seconds=30)
    planner = run(scenario, make("planner")).rates
    for number, (name, content) in enumerate(_broken(tmp_path).items()):
        path = tmp_path / f"weights {name}"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(WeightsError, match=name):
            load(path)
        auto = Auto(path)
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert "auto is the planner" in said
        assert f"weights {name}" in said
        if number == 0:
            assert run(scenario, auto).rates == planner


def test_weights_that_say_never_are_the_planner_without_a_word(tmp_path, capsys):
    scenario = dataclasses.replace(SCENARIOS["09"], seconds=20)
    path = _file(tmp_path / "never", _weights(caution=np.array([1, NEVER], np.float32)), {"format": FORMAT})
    outcome = run(scenario, Auto(path))
    assert capsys.readouterr().err == ""
    assert outcome.rates == run(scenario, make("planner")).rates


def test_the_weights_in_use_can_be_read_and_say_what_made_them(capsys):
    from safetensors import safe_open

    from sluice.agent.policies.learned.advantage import WEIGHTS

    make("auto")
    assert capsys.readouterr().err == ""
    with safe_open(WEIGHTS, framework="numpy") as file:
        told = file.metadata()
    assert told["command"].startswith("python -m agent train --policy auto")
    assert {"seed", "table", "format", "tries"} <= told.keys()
