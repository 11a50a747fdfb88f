"""A simulated pipeline from sightings: it does what they did, and predicts what they did not show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.agent.simulator.calibration import CalibrationError, Sighting
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage, TrueCosts
from sluice.benchmarks.calibration import Calibration
from sluice.ingest.knobs import Knobs, Limits
from tests.raises import raises

ROWS = 8192


def seen(truth: TrueCosts, *settings: str) -> list[Sighting]:
    """What a live pipeline of that truth would show."""
    found = []
    for text in settings:
        simulator = Simulator(lambda _: truth, limits(truth), alone(truth).parse(text))
        simulator.advance(5)
        before = simulator.snapshot()
        simulator.advance(5)
        found.append(Sighting(simulator.knobs, before, simulator.snapshot()))
    return found


def limits(truth: TrueCosts) -> Limits:
    return Limits(
        workers={s.name: (1, 64) for s in truth.stages},
        backends={s.name: s.backends for s in truth.stages},
    )


def alone(truth: TrueCosts) -> Knobs:
    return Knobs(workers={s.name: 1 for s in truth.stages})


def truth_of(
    *stages: SimStage, machine: SimMachine | None = None, step_s: float = 0.0
) -> TrueCosts:
    return TrueCosts(
        machine or SimMachine(cores=2, timer_noise=0, switch_cost=0),
        stages,
        Consumer(batch_rows=ROWS, step_s=step_s),
    )


def stage(name: str, cost_s: float, **others: object) -> SimStage:
    return SimStage(name=name, cost_s=cost_s, rows_per_item=ROWS, **others)  # type: ignore[arg-type]


CASES = {
    "a store that waits": (
        truth_of(stage("read", 0.06, cpu=0.1), stage("last", 0.002)),
        ("read=1", "read=2", "read=6", "read=16", "read=40"),
        ("read=3", "read=10", "read=28"),
    ),
    "a curve that flattens": (
        truth_of(stage("read", 0.001), stage("slow", 0.02, cpu=0.2, sigma=0.3)),
        ("slow=1", "slow=2", "slow=8"),
        ("slow=4", "slow=6", "slow=12"),
    ),
    "a curve that falls": (
        truth_of(
            stage("read", 0.001),
            stage("arm", 0.01, cpu=0.0, sigma=1.0, cliff_workers=1, cliff_factor=2.5),
        ),
        ("arm=1", "arm=2", "arm=4"),
        ("arm=3", "arm=6"),
    ),
    "the interpreter's lock": (
        truth_of(
            stage("read", 0.001),
            stage("python", 0.02, lock=1.0, process_cost_s=0.002, backends=("thread", "process")),
        ),
        (
            "python=1",
            "python=2",
            "python=3",
            "python=1,python.backend=process",
            "python=2,python.backend=process",
        ),
        ("python=4", "python=3,python.backend=process"),
    ),
    "a trainer": (
        truth_of(stage("read", 0.03, cpu=0.3), step_s=0.02),
        ("read=1", "read=4"),
        ("read=2", "read=3"),
    ),
    "second threads of a core": (
        truth_of(
            stage("read", 0.01),
            stage("last", 0.02),
            machine=SimMachine(cores=2, smt=0.4, timer_noise=0, switch_cost=0),
        ),
        ("read=1", "read=1,last=2", "read=2,last=2"),
        ("last=4",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_that_were_not_seen_are_predicted(name):
    truth, shown, hidden = CASES[name]
    found = Calibration.of(seen(truth, *shown))
    for sighting in seen(truth, *hidden):
        rate = found.rows_per_s(sighting.knobs)
        assert rate == pytest.approx(sighting.seen.rows_per_s, rel=0.1), sighting.knobs


def test_a_falling_stage_is_best_at_its_peak_in_the_prediction_too():
    truth, shown, _ = CASES["a curve that falls"]
    found = Calibration.of(seen(truth, *shown))
    rates = {n: found.rows_per_s(alone(truth).with_workers(arm=n)) for n in (1, 2, 3)}
    assert max(rates, key=lambda n: rates[n]) == 1


def held(sighting: Sighting) -> Sighting:
    return replace(
        sighting, after=replace(sighting.after, held_back=sighting.before.held_back + 50)
    )


def test_readers_that_memory_holds_back_are_not_taken_for_slow_ones():
    truth = truth_of(
        stage("read", 0.05, cpu=0.02), machine=SimMachine(cores=8, timer_noise=0, switch_cost=0)
    )
    short = truth_of(
        stage("read", 0.15, cpu=0.02), machine=truth.machine
    )  # a third of what they could
    found = Calibration.of([*seen(truth, "read=1", "read=8"), *map(held, seen(short, "read=16"))])
    rates = {n: found.rows_per_s(alone(truth).with_workers(read=n)) for n in (4, 8, 16)}
    assert rates == {
        n: pytest.approx(rate * ROWS / 0.05, rel=0.03) for n, rate in ((4, 4), (8, 8), (16, 16 / 3))
    }
    always = Calibration.of([held(s) for s in seen(truth, "read=4", "read=8")])
    rate = always.rows_per_s(alone(truth).with_workers(read=32))
    assert rate == pytest.approx(8 * ROWS / 0.05, rel=0.03)


def test_back_ends_that_were_not_seen_are_not_guessed():
    truth = CASES["the interpreter's lock"][0]
    found = Calibration.of(seen(truth, "python=1", "python=2"))
    with raises(CalibrationError, "read=1 python=2(process)"):
        found.rows_per_s(alone(truth).parse("python=2,python.backend=process"))


def test_what_says_nothing_is_refused():
    with raises(CalibrationError, "at least one setting"):
        Calibration.of([])
    some = seen(CASES["a trainer"][0], "read=1")[0]
    with raises(CalibrationError, "no rows", "read=1"):
        Calibration.of([Sighting(some.knobs, some.after, some.after)])
