"""Numbers that operators left to the loader make too large for a batch: an error that names them, or their rows."""

from pathlib import Path

import pyarrow as pa
import pytest

from sluice import Errors
from tests.dlrm import clicks_table
from tests.open_loader import quarantined_rows
from tests.product import BatchLoader, ColumnError, QuarantineError
from tests.raises import raises

pytestmark = pytest.mark.slow

ROWS = 1000
CHAINS = {
    "one": '{op = "fill"}, {op = "scale", by = 1e-20, online = true}',
    "two": '{op = "fill", online = true}, {op = "scale", by = 1e-20, online = true}',
}


RAW = pa.table(
    {
        "label": pa.array([n % 2 for n in range(ROWS)], pa.int64()),
        "x": [1e20 if n == 40 else float(n % 5) for n in range(ROWS)],
    }
)


def text_of(chain: str) -> str:
    return clicks_table.spec_text(
        {"label": "int", "x": "float"},
        '[[column]]\nname = "label"\nrole = "label"\n'
        f'[[column]]\nname = "x"\nrole = "dense"\nops = [{chain}]\n',
    )


def table(folder: Path, chain: str):
    """Row 40 of the first file holds 1e20. No job would publish it, as operators make more of it than a batch holds;
    this table is written without one."""
    return clicks_table.write(folder / "t", RAW, text=text_of(chain))


@pytest.mark.parametrize(("where", "value"), [("one", "1e+40"), ("two", "1e+40")])
def test_it_is_an_error_that_names_column_and_value(tmp_path, where, value):
    made = table(tmp_path, CHAINS[where])
    with (
        BatchLoader(made, batch_size=80, read_ahead_epochs=1) as loader,
        raises(
            (QuarantineError, ColumnError),
            "part-00000.parquet",
            "row group 0",
            "'x'",
            value,
            "float32",
            "clip",
        ),
    ):
        list(loader)


@pytest.mark.parametrize("where", CHAINS)
def test_or_its_row_alone_is_quarantined(tmp_path, where):
    made, listed = table(tmp_path, CHAINS[where]), tmp_path / "q.jsonl"
    errors = Errors(on_error="quarantine", max_rate=1, quarantine=listed)
    with BatchLoader(made, batch_size=80, read_ahead_epochs=1, errors=errors) as loader:
        batches = list(loader)
    assert sum(int((batch.weight == 0).sum()) for batch in batches) == 1
    assert all(bool(batch.dense.isfinite().all()) for batch in batches)
    (row,) = quarantined_rows(listed)
    assert (row["row"], "float32" in row["reason"]) == (40, True)
