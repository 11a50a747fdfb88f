"""What programs show: names and values from data with their control characters as escapes."""

import random
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.common.errors import printable
from sluice.common.program import run
from sluice.etl.__main__ import main as etl
from sluice.etl.job import main as job
from sluice.ingest.__main__ import main as ingest
from tests.etl.tables import toml

HOSTILE = (
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\r",
    "\x08",
    "\x7f",
    "\x9b2J",
    "\u202e",
    "\u2066",
    "\x0b",
)


def drawn_name(draw: random.Random) -> str:
    return "".join(draw.choice((*HOSTILE, "a", "ä", "7")) for _ in range(draw.randint(1, 5))) + "b"


def assert_shown_safely(text: str) -> None:
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t"}
    assert not bad, text


@pytest.mark.parametrize("seed", range(8))
def test_no_drawn_name_or_value_reaches_the_terminal_with_control_characters(
    tmp_path, capsys, seed
):
    draw = random.Random(seed)
    column, value, file = (drawn_name(draw) for _ in range(3))
    made = pa.table({"click": [0, 1] * 40, column: [f"{value}{n % 7}" for n in range(80)]})
    pq.write_table(made, data := tmp_path / f"{file}.parquet")
    (tmp_path / "spec.toml").write_text(
        f'[input]\nformat = "parquet"\ncolumns = ["click:int", {toml(column + ":text")}]\n'
        f'[[column]]\nname = "click"\nrole = "label"\n[[column]]\nname = {toml(column)}\n'
        'role = "sparse"\nops = [{op = "categorify"}]\n'
    )
    table, spec = tmp_path / "table", tmp_path / "spec.toml"
    calls = [
        (ingest, "guess", data),
        (ingest, "doctor", data),
        (ingest, "guess", tmp_path / f"{file}.none"),
        (job, "--spec", spec, "--input", data, "--output", table),
        (job, "--spec", spec, "--input", f"{data}x", "--output", tmp_path / value),
        (etl, "show", table),
        (etl, "check", tmp_path / file),
        (etl, value, table),
    ]
    for program, *words in calls:
        with pytest.raises(SystemExit):
            run(program, argv=[*map(str, words)])
        shown = capsys.readouterr()
        assert_shown_safely(shown.err)
        if program is not ingest:  # `guess` writes a spec, in which TOML has escapes of its own
            assert_shown_safely(shown.out)


def test_a_plain_text_stays_as_it_is():
    assert printable("Zoë\tсчёт\n日本 👍") == "Zoë\tсчёт\n日本 👍"
    assert printable("s3://a:b@c/d\x1b[0m") == "s3://***@c/d\\x1b[0m"
