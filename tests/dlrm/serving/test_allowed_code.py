"""The server runs what its user allows, and nothing that a table or a run folder names."""

import json
import shutil

import pytest

from sluice import FeatureTable
from sluice.common.settings import parse
from sluice.dlrm import serve
from sluice.etl.ops import OperatorError
from tests.dlrm import clicks_table
from tests.dlrm.hostile_table import MODULE, SPEC, ended, forget
from tests.dlrm.rig import meta_of, torchrec_warns
from tests.product import Permission, Servable, ServerOptions
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow


@torchrec_warns
def test_what_a_table_or_a_checkpoint_names_is_not_run(hostile, ran, capsys, tmp_path):
    trained = hostile / "run"
    assert ended(serve.main, trained, "--port", 0) == 2
    said = capsys.readouterr().err
    assert_names(
        said, "'I1'", hostile / "table", "version 0", f"'{MODULE}:halved'", f"--allow-code {MODULE}"
    )
    other = tmp_path / "run"
    shutil.copytree(trained, other)
    meta, values = meta_of(other)
    values["config"]["udf"] = [f"{MODULE}:halved"]
    meta.write_text(json.dumps(values))
    assert ended(serve.main, other, "--port", 0) == 2
    assert "'udf'" in capsys.readouterr().err
    assert not ran()


def test_what_the_user_allows_runs_and_nothing_else(hostile, ran, tmp_path):
    """By the options as a server has them: the module, or a spec of the user's own that names the function."""
    own = tmp_path / "own.toml"
    own.write_text(SPEC)
    columns = clicks_table.columns_of(clicks_table.raw_rows(5))

    def allowed(*words: object) -> Permission:
        return parse(ServerOptions, argv=["run", *map(str, words)], prog="serve").code.permission

    for words in ((), ("--allow-code", "another.module"), ("--allow-code", MODULE.upper())):
        with raises(OperatorError, f"allow_code=('{MODULE}',)"):
            Servable.load(hostile / "run", allow_code=allowed(*words))
        assert not ran()
    for words in (f"--allow-code another.module --allow-code {MODULE}".split(), ("--spec", own)):
        forget(hostile)
        servable = Servable.load(hostile / "run", allow_code=allowed(*words))
        assert ran()
        assert len(servable.probabilities(columns, {})) == 5
    both = parse(ServerOptions, argv=["run", "--spec", str(own)], prog="serve").code
    assert both.permission_with(["mine:cut:C1>C1"]).functions == {f"{MODULE}:halved", "mine:cut"}
    table = FeatureTable.open(hostile / "table", allow_code=(MODULE,))
    assert table.spec().import_functions().keys() == {f"{MODULE}:halved"}
    # A module that is allowed gives what it defines, not what it has imported from elsewhere.
    with raises(OperatorError, "posixpath", "not allowed"):
        Permission.of((MODULE,)).load(f"{MODULE}:basename", "a table")
    with raises(OperatorError, "../evil", "module"):
        Permission.of(("../evil",))
