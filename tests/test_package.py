"""One name on the import path: what a wheel installs, and that a checkout and a wheel are imported alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("etl", "ingest", "agent", "dlrm")


def run(code: str, folder: Path, path: Path = ROOT) -> str:
    """Python in `folder`, as a script that lies there would run it, with `path` where packages are installed."""
    (folder / "script.py").write_text(code)
    done = subprocess.run([sys.executable, folder / "script.py"], cwd=folder, text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(path)}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_installs_nothing_but_sluice(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sluice"}
    ours = {str(Path("sluice", p.relative_to(ROOT))) for room in ROOMS for p in (ROOT / room).rglob("*.py")}
    assert ours <= set(names)
    assert {n for n in names if n.endswith((".html", ".safetensors", ".json"))}, "what modules read lies beside them"


def test_a_wheel_works_beside_a_users_own_folders(wheel, tmp_path):
    """Somebody's `agent/` and `etl/` are theirs; ours are parts of `sluice`."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise ImportError('this is the user\\'s own folder')\n")
    found = run("from sluice.agent import controller; from sluice import Knobs, Loader; print(controller.__file__)",
                tmp_path, site)
    assert Path(found).is_relative_to(site)


def test_a_checkout_works_beside_a_users_own_folders(tmp_path):
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise ImportError('this is the user\\'s own folder')\n")
    found = run("from sluice.agent import controller; print(controller.__file__)", tmp_path)
    assert Path(found) == ROOT / "agent" / "controller.py"


@pytest.mark.parametrize("command", ["dlrm.train", "ingest", "etl.job", "sluice train"])
def test_no_module_comes_twice_under_two_names(command):
    module, *words = command.split()
    code = (f"import json, os, runpy, sys\nos._exit = sys.exit\nsys.argv = {['x', *words, '--help']!r}\n"
            f"try:\n    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
            "except SystemExit:\n    pass\n"
            "print('\\n' + json.dumps([m.__file__ for m in {id(m): m for m in sys.modules.values()}.values() "
            "if getattr(m, '__file__', None)]))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    files = [f for f in json.loads(done.stdout.splitlines()[-1]) if Path(f).is_relative_to(ROOT)
             and Path(f).relative_to(ROOT).parts[0] in ("sluice", *ROOMS)]
    assert len(files) == len(set(files)) > 5


def test_every_verb_answers_for_help_and_a_misspelt_one_is_corrected():
    from sluice.__main__ import VERBS, usage

    assert all(verb in usage() for verb in VERBS)
    done = subprocess.run([sys.executable, "-m", "sluice", "evalute"], cwd=ROOT, text=True, capture_output=True,
                          check=False)
    assert done.returncode == 2
    assert "evaluate" in done.stderr.splitlines()[0]
    help_ = subprocess.run([sys.executable, "-m", "sluice", "bench", "--help"], cwd=ROOT, text=True,
                           capture_output=True,
                           check=False)
    assert help_.returncode == 0
    assert "--batch-size" in help_.stdout


def test_a_function_of_an_older_run_is_found_in_a_wheel_too(wheel, tmp_path):
    """Older runs and registries hold names such as dlrm.NAME:function; a user's own package of that name is theirs."""
    site, mine = tmp_path / "site", tmp_path / "mine" / "dlrm"
    zipfile.ZipFile(wheel).extractall(site)
    code = "from sluice.ingest.process.child_main import load\nprint(load('dlrm.feature_service:levels').__module__)"
    assert run(code, tmp_path, site) == "sluice.dlrm.feature_service"
    mine.mkdir(parents=True)
    (mine / "__init__.py").write_text("")
    (mine / "feature_service.py").write_text("def levels(columns):\n    return columns\n")
    assert run(code, tmp_path / "mine", site) == "dlrm.feature_service"
    (mine / "feature_service.py").unlink()
    with pytest.raises(AssertionError, match=r"No module named 'dlrm\.feature_service'"):
        run(code, tmp_path / "mine", site)


def test_a_new_file_is_imported_without_installing_anew(tmp_path):
    """The rooms are folders of the checkout, not copies."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "sluice", *ROOMS):
        (copy / name).symlink_to(ROOT / name)
    (copy / "agent").unlink()
    shutil.copytree(ROOT / "agent", copy / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "sluice").unlink()
    shutil.copytree(ROOT / "sluice", copy / "sluice", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "agent" / "policies" / "mine.py").write_text("NAME = 'mine'\n")
    assert run("from sluice.agent.policies.mine import NAME; print(NAME)", tmp_path, copy) == "mine"


def test_the_facade_is_light_and_gives_what_it_says():
    code = ("import sys, sluice; before = set(sys.modules); sluice.Knobs; sluice.FeatureTable\n"
            "assert not {'torch', 'pyspark', 'petastorm', 'pandas'} & set(sys.modules), sorted(sys.modules)\n"
            "assert sluice.Loader.__module__ == 'sluice.loader'\n"
            "assert callable(sluice.report)")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
