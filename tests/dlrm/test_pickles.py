"""Nothing is unpickled: what our modules name, and older programs' checkpoints, which are converted by a list of names.

What programs make of a run folder full of hostile pickles is in test_serving.py, where there is a run to go through."""

from __future__ import annotations

import ast
import json
import pickle  # noqa: TID251  it makes what must not be read
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from sluice.dlrm import convert
from sluice.dlrm.checkpoint.meta import CheckpointError, CheckpointMeta, check, latest
from sluice.dlrm.checkpoint.partial_read import CheckpointReader
from tests.dlrm.rig import ROOT, Bomb

META = CheckpointMeta(config={}, version=0, fingerprint={}, columns={}, dense=(), step=7)
STATE = {"model": {"tables.embedding_bags.a.weight": torch.arange(12.0).view(4, 3), "tower.bias": torch.ones(2)},
         "dense": {"step": torch.tensor(5), "betas": [0.9, 0.99]}}

FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list",
           "read_pickle", "FileSystemReader", "FileSystemWriter"}


def reads(tree: ast.AST) -> set[str]:
    """What could unpickle something."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} if (node.module or "").split(".")[0] in FORBIDDEN else set()
            found |= {alias.name for alias in node.names if alias.name in OBJECTS}
        elif isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            said = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            owner = ast.unparse(node.func.value)
            if (owner == "torch" and said.get("weights_only") is not True) or (
                    owner in ("np", "numpy") and said.get("allow_pickle") is not False):
                found.add(f"{owner}.load")
    return found


def test_no_module_of_ours_unpickles_but_the_one_that_converts_older_checkpoints():
    assert reads(ast.parse("import pickle\nimport torch\ntorch.load(f)\ndist.all_gather_object(a, b)")) == {
        "pickle", "torch.load", "all_gather_object"}
    found = {str(path.relative_to(ROOT)): names for room in ("etl", "ingest", "agent", "dlrm")
             for path in (ROOT / room).rglob("*.py")
             if any(word in (text := path.read_text()) for word in (*FORBIDDEN, *OBJECTS, "torch.load", "p.load"))
             and (names := reads(ast.parse(text)))}
    assert found == {"dlrm/convert.py": {"pickle"}}


@pytest.fixture
def old(tmp_path) -> Path:
    """A run with a checkpoint as older programs left it."""
    path = tmp_path / "run" / "checkpoints" / "step-000000007"
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        save(STATE, checkpoint_id=path, no_dist=True)
    _complete(path)
    (path.parent / "LATEST").write_text(path.name)
    return path


def _complete(path: Path) -> None:
    sums = {file.name: zlib.crc32(file.read_bytes()) for file in path.iterdir() if file.name != "meta.json"}
    (path / "meta.json").write_text(json.dumps({**asdict(META), "sums": sums}))


def test_an_older_checkpoint_is_refused_with_the_command_and_the_same_once_converted(old):
    with pytest.raises(CheckpointError, match=rf"as a pickle, .*`sluice convert {old.parent.parent}`"):
        latest(old.parent)
    assert convert.main([str(old.parent.parent)]) == {"converted": [old.name], "left": []}
    path, meta = latest(old.parent)
    check(path)
    assert meta.step == 7
    assert sorted(p.name for p in path.iterdir()) == ["layout.json", "meta.json", "rank-00000.safetensors"]
    found = CheckpointReader(path)
    tensors = {f"{part}.{key}": value for part in STATE for key, value in STATE[part].items() if key != "betas"}
    assert found.values == {"dense.betas": [0.9, 0.99]}
    assert found.sizes == {key: tuple(value.shape) for key, value in tensors.items()}
    assert all(torch.equal(value, tensors[key]) for key, value in found.whole(tensors).items())
    assert convert.main([str(old.parent.parent)]) == {"converted": [], "left": [old.name]}


def test_a_layout_or_a_part_that_would_run_code_is_not_converted(old, tmp_path):
    marker = tmp_path / "code ran"
    pickle.loads(pickle.dumps(Bomb(marker))).close()
    assert marker.exists(), "the bomb is none"
    marker.unlink()
    for name in (".metadata", "__0_0.distcp"):
        whole = (old / name).read_bytes()
        (old / name).write_bytes(pickle.dumps(Bomb(marker), 2).ljust(len(whole), b"."))
        with pytest.raises(CheckpointError, match=f"damaged: {name} is not as it was written"):
            convert.main([str(old.parent.parent)])
        _complete(old)  # whoever can change a file can change its checksum
        with pytest.raises(CheckpointError, match="cannot be converted: "):
            convert.main([str(old.parent.parent)])
        (old / name).write_bytes(whole)
        _complete(old)
    assert not marker.exists()
