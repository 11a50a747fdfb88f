"""The knobs that a policy chooses are the knobs in force, whatever the layout before them was."""

import itertools
import random

import numpy as np
import pytest

from sluice import Knobs, Transform
from tests.agent.fake import Script
from tests.agent.test_host import MemoryStore, untold
from tests.etl.tables import write_rows
from tests.open_loader import open_loader
from tests.product import Controller, HostMember, HostTunable, Policy, Reason

HERE = "tests.agent.test_layouts"


def tokens(columns):
    return {"length": [len(text) for text in columns["query"].to_pylist()]}


def first(columns):
    return {}


def second(columns):
    return {}


def limited(columns):
    return {}


class Drawn(Policy):
    """Draws a layout at each look, or goes back to an earlier one. It need not name `thread`, as planners need not."""

    name = "drawn"

    def __init__(self, seed):
        self.draw, self.asked = random.Random(seed), []

    def initial(self, limits, knobs):
        return limits, [knobs]

    def decide(self, snapshot, state):
        limits, before = state
        chosen = self.draw.choice(before) if self.draw.random() < 0.4 else self.new(limits)
        self.asked.append(chosen)
        return chosen, (limits, [*before, chosen]), Reason(text="drawn")

    def new(self, limits):
        draw = self.draw
        backend = {stage: draw.choice(kinds) for stage, kinds in limits.backends.items()}
        named = {s: b for s, b in backend.items() if b != "thread" or draw.random() < 0.3}
        workers = {s: draw.randint(low, min(high, 4)) for s, (low, high) in limits.workers.items()}
        return Knobs(workers=workers, backend=named)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "a.parquet"
    rows = np.arange(200)
    write_rows(path, label=rows % 2, row=rows, query=[f"q{row}" for row in rows])
    return path


def calls_of(seed):
    """Functions over rows and batches that can run in threads only, in processes only, or in both."""
    over_rows = Transform(f"{HERE}:tokens", reads=["query"], gives={"length": "float32"})
    others = [
        Transform(f"{HERE}:first"),
        Transform(f"{HERE}:second"),
        Transform(f"{HERE}:limited", limit_s=60),
        Transform(lambda _: {}, "local"),
    ]
    draw = random.Random(seed)
    return [over_rows, *draw.sample(others, draw.randint(1, 4))]


@pytest.mark.parametrize(("seed", "ranks"), [*itertools.product(range(3), ("one", "of a host"))])
def test_drawn_layouts_are_in_force_as_they_were_chosen(texts, seed, ranks):
    roles = {"label": "label", "dense": "length", "sparse": "row"}
    policy, clock, events = Drawn(seed), itertools.count(step=10), []
    with open_loader(texts, batch_size=20, roles=roles, transforms=calls_of(seed)) as loader:
        store = MemoryStore()
        member = HostMember(store, "host", 0, loader, tell=untold)
        host = HostTunable(store, "host", loader, ranks={"host": 1})
        controller = Controller(
            loader if ranks == "one" else host,
            policy,
            record=events.append,
            clock=lambda: next(clock),
            changes_a_minute=10**6,
        )
        for _ in range(40):
            member.step()
            controller.step()
            member.step()
            assert controller.frozen is None, events
            chosen, knobs = policy.asked[-1], loader.knobs
            assert knobs.workers == chosen.workers
            for stage in loader.limits.workers:
                usual = "thread" if "thread" in loader.limits.backends_of(stage) else "process"
                assert knobs.backend.get(stage, usual) == chosen.backend.get(stage, usual), stage
    assert len({tuple(k.backend.items()) for k in policy.asked}) > 5


def test_if_tuning_ends_one_line_says_so(texts, capsys):
    events = []
    wrong = Script(Knobs(workers={"decode": 4000}))
    with open_loader(texts, batch_size=20, roles={"label": "label", "sparse": "row"}) as loader:
        clock = itertools.count(step=10).__next__
        controller = Controller(loader, wrong, record=events.append, clock=clock)
        for _ in range(3):
            controller.step()
    assert [event["kind"] for event in events] == ["fault"]
    [line] = [line for line in capsys.readouterr().err.splitlines() if "tuning" in line]
    assert "tuning stopped" in line
    assert "KnobError" in line
    assert "'decode': 4000" in line
