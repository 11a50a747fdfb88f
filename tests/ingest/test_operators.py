"""Operators left to the loader: applied as by the ETL, and only to their own columns."""

from __future__ import annotations

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


def test_columns_with_operators_are_changed():
    operators = Operators(FIELDS, None)
    stored = pa.array(np.arange(8.0) - 4)
    made = {name: function(stored) for name, function in operators.stored.items()}
    assert made.keys() == {"I1", "I3"}
    np.testing.assert_array_equal(
        made["I1"], ops.online(FIELDS[0], None)(stored).astype(np.float32)
    )
