"""The fuzzer of the four ways finds mistakes that are planted in one of them, and nothing in the code as it is."""

import json
from typing import Any

import pytest

from sluice.dlrm.serving import decode
from sluice.etl.apply import cells
from sluice.etl.apply.cells import TextCells
from sluice.etl.ops import OPERATORS, ids, scaling
from sluice.etl.spec import columns
from tests.changed_function import changed
from tests.fuzz import four_ways
from tests.fuzz.drawn_specs import JSON_MISFITS, PARAMETERS, drawn
from tests.run_program import run_program

REGRESSIONS = (1, 2, 9, 21, 22, 23, 34, 44, 5041, 20342, 174563564, 516262805)
"""Seeds that once found something."""
SEEDS = [seed for seed in range(1, 80) if seed % four_ways.SPARK_EVERY]
SERVER, LOADER, JOB = (four_ways.Server, "features"), (four_ways, "load"), (four_ways, "made")


def plant(
    monkeypatch: pytest.MonkeyPatch, way: tuple[Any, str], mistake: tuple[Any, str, str, str]
) -> None:
    """Changes a function as long as that way runs, and no other."""
    owner, name, old, new = mistake
    mistaken, run = changed(owner, name, old, new), getattr(*way)

    def with_mistake(*arguments: Any) -> Any:
        with monkeypatch.context() as inside:
            inside.setattr(owner, name, mistaken)
            return run(*arguments)

    monkeypatch.setattr(*way, with_mistake)


def first_found(seeds: list[int], tmp_path_factory: pytest.TempPathFactory) -> int | None:
    return next(
        (seed for seed in seeds if four_ways.try_seed(seed, tmp_path_factory.mktemp("seed"))), None
    )


def test_every_operator_is_drawn():
    assert PARAMETERS.keys() == OPERATORS.keys()


def test_a_seed_draws_the_same_in_every_process(tmp_path):
    case = drawn(11, tmp_path)
    program = (
        "import json, pathlib; from tests.fuzz.drawn_specs import drawn; "
        f"case = drawn(11, pathlib.Path({str(tmp_path)!r})); "
        "print(json.dumps([case.etl(), case.loader(), repr(case.rows)]))"
    )
    printed = run_program("-c", program, check=True)
    assert json.loads(printed.stdout) == [case.etl(), case.loader(), repr(case.rows)]


def test_a_job_rejects_every_value_that_is_drawn_because_it_fits_no_column(tmp_path):
    cells = [f'"{kind}": {misfit}' for kind, misfits in JSON_MISFITS.items() for misfit in misfits]
    (tmp_path / "rows.json").write_text(
        "".join(f'{{"click": 1, {cell}}}\n' for cell in ['"int": 1', *cells])
    )
    columns = ", ".join(f'"{kind}:{kind}"' for kind in JSON_MISFITS)
    text = (
        f'[input]\nformat = "json"\ncolumns = ["click:int", {columns}]\n[table]\nsplit = {{all = 1}}\n'
        '[[column]]\nname = "click"\nrole = "label"\n'
        '[[column]]\nname = "number"\nfrom = "int"\nrole = "dense"\nops = [{op = "fill"}]\n'
    )
    rejected = four_ways.made(None, text, tmp_path / "rows.json", tmp_path / "table").rejected
    assert [line for line, _ in rejected] == list(range(2, len(cells) + 2))


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_was_found_once_is_found_no_more(seed, tmp_path):
    assert four_ways.try_seed(seed, tmp_path) == []


# The first of SEEDS that finds it, as rows and specs are drawn now, then the way, and what is changed there.
MISTAKES = {
    "a value is rounded to float32": (
        14,
        LOADER,
        scaling.Standardise,
        "map",
        "(values - mean)",
        "(values.astype(np.float32) - mean)",
    ),
    "a null has another id": (1, SERVER, ids, "ids_of", "= NULL", "= FIRST"),
    "zero is missing": (
        15,
        SERVER,
        decode.Decoder,
        "_column",
        "row.get(name)",
        "row.get(name) or None",
    ),
    "a fraction is an int": (
        5,
        SERVER,
        cells,
        "json_cell",
        'isinstance(value, int) and kind == "int"',
        'kind == "int"',
    ),
    "a decimal comma is no mark": (
        26,
        SERVER,
        TextCells,
        "_rewrite",
        'self._decimal == ","',
        'self._decimal == "x"',
    ),
    "numbers are stored as float32": (
        1,
        JOB,
        columns,
        "leave_to_loader",
        'stored_as = "double"',
        'stored_as = "float"',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_way_is_found(monkeypatch, tmp_path_factory, mistake):
    first, way, *where = MISTAKES[mistake]
    plant(monkeypatch, way, tuple(where))
    assert first_found([first, *SEEDS], tmp_path_factory) is not None
