"""Nothing is unpickled: what our modules name, and checkpoints of pickles.

What programs make of a run folder full of hostile pickles is in test_serving.py, where there is a run to go through."""

import ast
import json
from pathlib import Path

import pytest

from tests.dlrm.rig import META, ROOT, meta_of
from tests.product import Checkpoint, CheckpointDisk, CheckpointError, latest
from tests.raises import raises

FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "recv_object_list",
    "read_pickle",
    "FileSystemReader",
    "FileSystemWriter",
}


def reads(tree: ast.AST) -> set[str]:
    """What could unpickle something."""
    uses = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses |= {alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN}
        elif isinstance(node, ast.ImportFrom):
            uses |= {node.module} if (node.module or "").split(".")[0] in FORBIDDEN else set()
            uses |= {alias.name for alias in node.names if alias.name in OBJECTS}
        elif isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            uses.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "load"
        ):
            said = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            owner = ast.unparse(node.func.value)
            if (owner == "torch" and said.get("weights_only") is not True) or (
                owner in ("np", "numpy") and said.get("allow_pickle") is not False
            ):
                uses.add(f"{owner}.load")
    return uses


def test_no_module_of_ours_unpickles():
    assert reads(
        ast.parse("import pickle\nimport torch\ntorch.load(f)\ndist.all_gather_object(a, b)")
    ) == {"pickle", "torch.load", "all_gather_object"}
    uses = {
        str(path.relative_to(ROOT)): names
        for room in ("etl", "ingest", "agent", "dlrm")
        for path in (ROOT / room).rglob("*.py")
        if any(
            word in (text := path.read_text())
            for word in (*FORBIDDEN, *OBJECTS, "torch.load", "p.load")
        )
        and (names := reads(ast.parse(text)))
    }
    assert uses == {}


@pytest.fixture
def path(tmp_path) -> Path:
    """A checkpoint without tensors."""
    path = tmp_path / "checkpoints" / "step-000000007"
    path.mkdir(parents=True)
    META.write(path, {}, CheckpointDisk())
    return path


def test_a_checkpoint_of_pickles_is_refused(path):
    (path / ".metadata").write_bytes(b"a pickle, as torch.distributed.checkpoint leaves it")
    with raises(CheckpointError, "step-000000007", "layout.json", "FileNotFoundError"):
        Checkpoint(latest(path.parent)[0]).tower()


def test_a_checkpoint_that_does_not_say_which_rows_the_run_has_seen_is_refused(path):
    meta, about = meta_of(path.parent.parent)
    del about["trained"]
    meta.write_text(json.dumps(about))
    with raises(CheckpointError, "step-000000007", "'trained'"):
        latest(path.parent)
