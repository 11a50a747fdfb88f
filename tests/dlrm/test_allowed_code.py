"""A table and a run folder are data: no program imports what they name, unless its user says so."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.dlrm import evaluate, export, plan, serve, train
from sluice.dlrm.checkpoint.meta import latest
from sluice.dlrm.serving.served_model import Servable
from sluice.etl import __main__
from sluice.etl.common.program import run
from sluice.etl.ops import OperatorError
from sluice.etl.ops.user_function import Python
from sluice.etl.spec import code_options
from sluice.etl.spec.permission import Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table import FeatureTable
from sluice.ingest.__main__ import main as ingest_main
from sluice.ingest.loader import Loader
from tests.dlrm import clicks_table
from tests.dlrm.rig import command, environment

pytestmark = pytest.mark.slow

MODULE = "features_of_a_table"
CODE = """
from os.path import basename
from pathlib import Path
Path({mark!r}).touch()
def halved(values):
    import pyarrow.compute as pc
    return pc.divide(values, 2.0)
"""
SPEC = clicks_table.spec_text(features=clicks_table.FEATURES.replace(
    '{op = "fill", value = 0}, {op = "clip", low = -2}, {op = "log", shift = 3}]',
    f'{{op = "python", function = "{MODULE}:halved", inputs = "number", output = "number"}}, '
    '{op = "fill", value = 0}]'))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose record names a function of a module that lies in the table, and a run over it."""
    folder = tmp_path_factory.mktemp("hostile")
    table = folder / "table"
    table.mkdir()
    (table / f"{MODULE}.py").write_text(CODE.format(mark=str(folder / "mark")))
    sys.path.insert(0, str(table))
    try:
        clicks_table.write(table, clicks_table.raw_rows(2000), text=SPEC)
    finally:
        sys.path.remove(str(table))
    assert (folder / "mark").exists()  # its maker ran it: the test can tell
    forget(folder)
    # Where the trainer begins: Python itself puts the folder that it is started in on its path.
    import subprocess

    words = command(0, "dlrm.train", "--run-dir", folder / "run", "--data", table, "--batch-size", 256, "--width", 8,
                    "--dense-layers", "8", "--over-layers", "8", "--tuning", "fixed", "--allow-code", "another.module")
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.run(words, capture_output=True, text=True, cwd=table, check=False, timeout=120,
                             env={**environment(folder), "PYTHONPATH": root})
    assert process.returncode == 0, process.stderr[-3000:]
    assert not (folder / "mark").exists(), "training ran what the table names"
    return folder


def forget(folder: Path) -> None:
    (folder / "mark").unlink(missing_ok=True)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def ran(hostile, monkeypatch) -> Callable[[], bool]:
    """Whether the module was imported; it could be, as if the program were started in the table's folder."""
    forget(hostile)
    monkeypatch.chdir(hostile / "table")
    monkeypatch.syspath_prepend(str(hostile / "table"))
    return (hostile / "mark").exists


def ended(main: Callable[[list[str]], Any], *words: object) -> int:
    with pytest.raises(SystemExit) as end:
        run(main, argv=[str(word) for word in words])
    return int(end.value.code or 0)


@pytest.mark.filterwarnings("ignore::FutureWarning",
                            "ignore::UserWarning")  # torch of torchrec, see sluice.dlrm.telemetry.silence_warnings
def test_no_program_runs_what_a_table_or_a_run_folder_names(hostile, ran, capsys, tmp_path):
    table, trained = hostile / "table", hostile / "run"
    etl_main = __main__.main
    assert ended(etl_main, "show", table, "--json", "--html", tmp_path / "t.html") == 0
    assert ended(etl_main, "check", table) == 0
    short = ("--batch-size", 64, "--seconds", 0.05)
    assert ended(ingest_main, "bench", table, *short, "--run", tmp_path / "bench") == 0
    assert ended(ingest_main, "headroom", table, *short, "--step-ms", 1) == 0
    assert ended(ingest_main, "doctor", table) in (0, 1)
    assert ended(plan.main, "--data", table) == 0
    assert ended(train.main, "--data", table, "--run-dir", tmp_path / "new", "--check", "--batch-size",
                 64) == 0
    assert ended(evaluate.main, "--run-dir", trained, "--data", table) == 0
    assert ended(export.main, trained, "--out", tmp_path / "export") == 0
    assert ended(train.main, "--run-dir", trained, "--resume", "--epochs", 2, "--check") == 0
    with Loader(table, batch_size=64) as loader:
        next(iter(loader))
        loader.operators.others()
    assert not ran()
    capsys.readouterr()
    assert ended(serve.main, trained, "--port", 0) == 2
    said = capsys.readouterr().err
    assert f"column 'I1': the spec of {table}, version 0 names the function '{MODULE}:halved'" in said
    assert f"--allow-code {MODULE}" in said
    assert not ran()

    # Names in settings that a checkpoint brings: settings that there are not.
    other = tmp_path / "run"
    shutil.copytree(trained, other)
    meta = latest(other / "checkpoints")[0] / "meta.json"
    values = json.loads(meta.read_text())
    assert "allow_code" not in values["config"]  # it was given, and is to be given again
    for key in ("udf", "transform", "transforms", "allow_code"):
        meta.write_text(json.dumps({**values, "config": {**values["config"], key: [f"{MODULE}:halved"]}}))
        for main, words in ((train.main, ("--run-dir", other, "--resume", "--epochs", 2, "--check")),
                            (evaluate.main, ("--run-dir", other)), (export.main, (other,)),
                            (serve.main, (other, "--port", 0))):
            assert ended(main, *words) == 2
        assert f"'{key}'" in capsys.readouterr().err
    assert not ran()


def test_what_the_user_allows_runs_and_nothing_else(hostile, ran, tmp_path):
    """By the options as a server has them: the module, or a spec of the user's own that names the function."""
    own = tmp_path / "own.toml"
    own.write_text(SPEC)
    columns = {name: clicks_table.raw_rows(5)[name].combine_chunks() for name in clicks_table.COLUMNS}

    def allowed(*words: object) -> Permission:
        return code_options.given(serve.parser().parse_args(["run", *map(str, words)]))

    for words in ((), ("--allow-code", "another.module"), ("--allow-code", MODULE.upper())):
        with pytest.raises(OperatorError, match=f"allow_code=\\('{MODULE}',\\)"):
            Servable.load(hostile / "run", "fp32", allow_code=allowed(*words))
        assert not ran()
    for words in (("--allow-code", "another.module", "--allow-code", MODULE), ("--spec", own)):
        forget(hostile)
        servable = Servable.load(hostile / "run", "fp32", allow_code=allowed(*words))
        assert ran()
        assert len(servable.probabilities(columns)) == 5
    table = FeatureTable.open(hostile / "table", allow_code=(MODULE,))
    assert table.spec().imported().keys() == {f"{MODULE}:halved"}
    # A module that is allowed gives what it defines, not what it has imported from elsewhere.
    with pytest.raises(OperatorError, match="has from posixpath, and that module is not allowed"):
        Permission.of((MODULE,)).load(f"{MODULE}:basename", "a table")
    with pytest.raises(OperatorError, match="is no module's name"):
        Permission.of(("../evil",))
    with pytest.raises(OperatorError, match="must be several names"):
        Permission.of("mine")


def test_a_job_on_a_spec_that_came_with_a_table_is_refused_before_any_work(hostile, ran):
    from sluice.etl.jobs.job_run import Job
    from sluice.etl.table.store import TableStore

    stored = FeatureTable.open(hostile / "table").spec()
    assert [op.function for c in stored.columns for op in c.ops if isinstance(op, Python)] == [f"{MODULE}:halved"]
    with pytest.raises(OperatorError, match="names the function"):
        Job(spec=stored, inputs=("x",), store=TableStore(hostile / "other"))
    assert not ran()
    assert Spec.own(SPEC).imported()
    assert ran()
