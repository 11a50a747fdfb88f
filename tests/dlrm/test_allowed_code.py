"""A table and a run folder are data: no program imports what they name, unless its user says so."""

import json
import shutil

import pytest

from sluice import FeatureTable
from sluice.dlrm import evaluate, train
from sluice.etl import __main__
from sluice.etl.ops import OperatorError
from sluice.ingest.__main__ import main as ingest_main
from tests.dlrm.hostile_table import MODULE, SPEC, ended
from tests.dlrm.rig import meta_of, torchrec_warns
from tests.product import BatchLoader, Python, Spec
from tests.raises import raises

pytestmark = pytest.mark.slow


@torchrec_warns
def test_no_program_runs_what_a_table_or_a_run_folder_names(hostile, ran, capsys, tmp_path):
    table, trained = hostile / "table", hostile / "run"
    etl_main = __main__.main
    assert ended(etl_main, "show", table) == 0
    assert ended(etl_main, "check", table) == 0
    short = ["--batch-size", "64", "--seconds", "0.05"]
    assert ended(ingest_main, "bench", table, *short, "--run", tmp_path / "bench") == 0
    assert ended(ingest_main, "doctor", table) in (0, 1)
    assert (
        ended(
            train.main,
            *f"--data {table} --run-dir {tmp_path}/new --check --batch-size 64".split(),
        )
        == 0
    )
    assert ended(evaluate.main, *f"--run-dir {trained} --data {table}".split()) == 0
    assert ended(train.main, *f"--run-dir {trained} --resume --epochs 2 --check".split()) == 0
    with BatchLoader(table, batch_size=64) as loader:
        next(iter(loader))
    assert not ran()

    # Names in settings that a checkpoint brings: settings that there are not, and one that there is.
    other = tmp_path / "run"
    shutil.copytree(trained, other)
    meta, values = meta_of(other)
    assert "allow_code" not in values["config"]  # it was given, and is to be given again
    programs = (
        (train.main, f"--run-dir {other} --resume --epochs 2 --check".split()),
        (evaluate.main, ("--run-dir", other)),
    )
    for key in ("udf", "transform", "allow_code", "transforms"):
        config = {**values["config"], key: [f"{MODULE}:halved"]}
        meta.write_text(json.dumps({**values, "config": config}))
        for main, words in programs:
            assert ended(main, *words) == 2
            said = capsys.readouterr().err
            if key == "transforms":
                assert "does not fit" in said or f"names the function '{MODULE}:halved'" in said
            else:
                assert f"'{key}'" in said
    assert not ran()


def test_a_job_on_a_spec_that_came_with_a_table_is_refused_before_any_work(hostile, ran):
    from sluice.etl.jobs.job import Job
    from sluice.etl.table.store import TableStore

    stored = FeatureTable.open(hostile / "table").spec()
    assert [op.function for c in stored.columns for op in c.ops if isinstance(op, Python)] == [
        f"{MODULE}:halved"
    ]
    with raises(OperatorError, "names the function"):
        Job(spec=stored, inputs=("x",), store=TableStore(hostile / "other"))
    assert not ran()
    assert Spec.own(SPEC).import_functions()
    assert ran()
