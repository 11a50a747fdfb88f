"""Operators left to the loader: applied as by the ETL, their cost counted column by column."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa

from sluice.etl import ops
from sluice.etl.schema import Field
from sluice.ingest.stages.table_operators import Operators

CLIP, LOG = {"op": "clip", "low": -2.0}, {"op": "log", "shift": 3.0}
FIELDS = [
    Field(name=name, role="dense", type="double", online=online, nullable=bool(online))
    for name, online in (("I1", (CLIP, LOG)), ("I2", ()), ("I3", (LOG,)))
]


def test_columns_are_changed_and_each_is_charged_its_own_time():
    times = itertools.accumulate(
        itertools.cycle([0.0, 3.0, 0.0, 1.0])
    )  # 3 s and 1 s for the two columns
    operators = Operators(FIELDS, None, clock=lambda: next(times))
    stored = pa.array(np.arange(8.0) - 4)
    for _ in range(2):
        made = {name: function(stored) for name, function in operators.stored.items()}
    assert made.keys() == {"I1", "I3"}
    np.testing.assert_array_equal(
        made["I1"], ops.online(FIELDS[0], None)(stored).astype(np.float32)
    )
    costs = {c["column"]: c for c in operators.costs()}
    assert (costs["I1"]["operators"], costs["I3"]["operators"]) == ("clip+log", "log")
    assert costs["I1"]["cpu_s"] == 2 * 3.0 / 16
    assert costs["I3"]["cpu_s"] == 2 * 1.0 / 16
    assert costs["I1"]["bytes_before"] > 0
