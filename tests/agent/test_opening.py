"""The initial setting: its inputs and its limits."""

from __future__ import annotations

from sluice.agent.policies.opening.contract import (
    ColumnGroup,
    Foreknowledge,
    InitialSetting,
    PolicyInput,
    PolicyInputError,
)
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.stats import Snapshot
from tests.agent.made_figures import snapshot, stage_stats
from tests.raises import raises

LIMITS = Limits(
    workers={"read": (1, 16), "decode": (1, 8)}, backends={"decode": ("thread", "process")}
)
KNOBS = Knobs(workers={"read": 1, "decode": 1})


def look(at: float, *names: str) -> Snapshot:
    return snapshot(at, *(stage_stats(name, busy_s=at) for name in names or ("read", "decode")))


def test_an_input_is_two_looks_at_one_pipeline_with_knobs_within_its_limits():
    right = {"begun": look(0.0), "seen": look(0.25), "knobs": KNOBS, "limits": LIMITS}
    assert PolicyInput(**right).known == Foreknowledge()
    for wrong, facts in (
        ({"begun": look(0.25)}, ["0.25 s"]),
        ({"seen": look(0.25, "read")}, ["different stages"]),
        ({"knobs": KNOBS.with_workers(decode=9)}, ["'decode'", 9]),
        ({"process_bytes": 0}, ["process_bytes", 0]),
    ):
        with raises((PolicyInputError, KnobError), *facts):
            PolicyInput(**right | wrong)


def test_what_is_known_beforehand_is_checked():
    columns = {
        "int64": ColumnGroup(count=26, bytes_per_row=208),
        "float": ColumnGroup(count=13, bytes_per_row=52),
    }
    assert Foreknowledge(columns=columns).row_bytes == 260
    for wrong in ({"store": "tape"}, {"operators": {"decode": "magic"}}, {"row_group_rows": 0}):
        with raises(PolicyInputError, *wrong):
            Foreknowledge(**wrong)
    for inside, rate in ((True, None), (False, 1e5), (True, 0.0)):
        with raises(PolicyInputError, "rows_per_s"):
            InitialSetting(knobs=KNOBS, inside=inside, reason="", rows_per_s=rate)
