"""Every extra holds what its programs import: a built wheel, beside exactly the distributions that the extra brings."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.small_table import small_table
from sluice.common.extras import DISTRIBUTION, EXTRAS, OF_VERBS, advice
from tests.raises import assert_names

pytestmark = pytest.mark.slow

# What is installed without resolving, for the reasons in docs/decisions/0001-dependencies.md.
STANDS_FOR = {
    "fbgemm-gpu": "fbgemm-gpu-cpu"
}  # torchrec names the GPU build; the CPU build serves as well
NOT_TAKEN = {
    ("petastorm", "setuptools")
}  # 0.13.1 pins setuptools<70, and torch needs a newer one; pip takes 0.12.1

PRELUDE = """
import contextlib, io, os, site, sys
from importlib import import_module
site.addsitedir(os.environ["PYTHONPATH"])  # as an installation reads its .pth files: setuptools brings distutils so
from sluice.__main__ import main

given = sys.argv[1:]
leave, os._exit = os._exit, sys.exit  # the trainer ends its process at once, and here others are to follow

def called(*words):
    '''A verb's exit code, standard output and standard error.'''
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["sluice", *map(str, words)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()

def helps(*verbs):
    for verb in verbs:
        code, out, err = called(verb, "--help")
        assert code == 0 and "usage: sluice" in out, (verb, code, out, err)

def refused(extra, *words):
    '''One sentence, and no traceback.'''
    code, out, err = called(*words)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1, (words, code, out, err)
    assert f'pip install "sluice-recsys[{extra}]"' in lines[0], (words, err)

def imports(*names):
    for name in names:
        import_module(name)

def absent(*names):
    for name in names:
        try:
            import_module(name)
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"{name} can be imported")
"""


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    """The wheel's files."""
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def ours(unpacked) -> metadata.Distribution:
    return next(iter(metadata.distributions(name=DISTRIBUTION, path=[str(unpacked)])))


def closure(ours: metadata.Distribution, extra: str) -> dict[str, metadata.Distribution]:
    """The distributions that the wheel needs with this extra, each in a version that is asked for."""
    needed: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    ahead: list[tuple[metadata.Distribution, str]] = [(ours, ""), (ours, extra)]
    while ahead:
        having, its_extra = ahead.pop()
        name = canonicalize_name(having.metadata["Name"])
        if (name, its_extra) in seen:
            continue
        seen.add((name, its_extra))
        for line in having.requires or ():
            wanted = Requirement(line)
            other = canonicalize_name(wanted.name)
            if (name, other) in NOT_TAKEN or (
                wanted.marker and not wanted.marker.evaluate({"extra": its_extra})
            ):
                continue
            if other == DISTRIBUTION:
                ahead += [(ours, e) for e in wanted.extras]
                continue
            other = STANDS_FOR.get(other, other)
            there = metadata.distribution(other)
            assert wanted.specifier.contains(there.version, prereleases=True), (
                f"{name} wants {line}: {there.version}"
            )
            needed[other] = there
            ahead += [(there, e) for e in ("", *wanted.extras)]
    return needed


@pytest.fixture
def site(unpacked, ours, tmp_path):
    """Makes the folder of an extra: the wheel's content, and links to what the extra brings."""

    def make(extra: str = "") -> Path:
        folder = tmp_path / "site"
        folder.mkdir()
        for entry in unpacked.iterdir():
            (folder / entry.name).symlink_to(entry)
        for there in closure(ours, extra).values():
            for name in {file.parts[0] for file in there.files or ()} - {"..", "__pycache__"}:
                if not (folder / name).exists():  # two distributions may share a folder
                    (folder / name).symlink_to(Path(str(there.locate_file(name))))
        return folder

    return make


def run(
    site: Path, code: str, *arguments: object, prelude: str = PRELUDE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python without site-packages, in a folder of its own, with `site` as the only place of packages.

    The folder has a user's own packages that are named as our rooms are."""
    work = site.parent / "work"
    for room in ("etl", "ingest", "agent", "dlrm"):
        (work / room).mkdir(parents=True)
        (work / room / "__init__.py").write_text("raise ImportError('a user\\'s own folder')")
    script = work / "script.py"
    script.write_text(
        f"{prelude}{code}\nprint('to the end', flush=True)\nsys.stderr.flush()\nleave(0)\n"
    )
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-S", "-s", script, *map(str, arguments)],
        cwd=work,
        text=True,
        capture_output=True,
        check=False,
        timeout=120,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(site),
            "HOME": str(work),
            "TMPDIR": str(site.parent),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["to the end"]), done.stderr[
        -4000:
    ]
    return done


@pytest.fixture
def files(tmp_path):
    """Two Parquet files of Arrow's."""
    folder = tmp_path / "clicks"
    folder.mkdir()
    rows = 1024
    for number in range(2):
        pq.write_table(
            pa.table(
                {
                    "label": np.arange(rows, dtype=np.int8) % 2,
                    "d": np.ones(rows, np.float32),
                    "c": np.arange(rows, dtype=np.int32),
                }
            ),
            folder / f"{number}.parquet",
        )
    return folder


def test_whatever_is_imported_belongs_to_the_base_or_to_an_extra(ours, unpacked):
    """Also what is imported late: a program that misses it names the extra."""
    imported = set()
    for path in (unpacked / "sluice").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    base = {
        Requirement(line).name.replace("-", "_")
        for line in ours.requires or ()
        if "extra ==" not in line
    }
    assert base == {
        "numpy",
        "obstore",
        "psutil",
        "pyarrow",
        "torch",
        "zlib_ng",
    }
    assert imported - {*sys.stdlib_module_names, "sluice"} <= base | EXTRAS.keys()
    assert {*EXTRAS.values(), *OF_VERBS.values()} <= set(
        ours.metadata.get_all("Provides-Extra") or ()
    )


@pytest.mark.parametrize(
    ("reason", "facts"),
    [
        (
            "libnvidia-ml.so.1: cannot open shared object file: No such file or directory",
            ('fbgemm-gpu-cpu==1.6.*"', "pip uninstall -y fbgemm-gpu", "driver"),
        ),
        (
            "/site/fbgemm_gpu/fbgemm.so: undefined symbol: _ZN3c10",
            ("another torch than 2.11.0+cpu", 'pip install "torchrec==1.6.*"'),
        ),
    ],
)
def test_why_fbgemm_cannot_be_loaded_is_quoted_with_the_command_that_helps(
    monkeypatch, reason, facts
):
    """torch names the library, and the loader's error is the cause."""
    monkeypatch.setattr(metadata, "version", {"torch": "2.11.0+cpu"}.get)
    error = OSError("Could not load this library: /site/fbgemm_gpu/fbgemm_gpu_config.so")
    error.__cause__ = OSError(reason)
    assert_names(advice(error, "train"), reason, *facts)
    assert not advice(OSError("No such file or directory: 'fbgemm.so'"))


LOAD = """
from sluice import Loader, Reading
with Loader(given[0], batch_size=512{more}) as loader:
    assert sum(batch.rows for batch in loader) == 2048
"""


def test_the_base_is_a_loader_and_says_once_who_reads(site, files):
    done = run(
        site(),
        LOAD.format(more="")
        + """
from sluice.ingest.read.sources import reader_of
assert reader_of(None) == reader_of(None) == "arrow"  # as for a feature table
try:
    Loader(given[0], batch_size=512, reading=Reading(reader="petastorm"))
except ValueError as error:
    assert 'pip install "sluice-recsys[petastorm]"' in str(error), error
else:
    raise AssertionError("petastorm was not missed")
absent("petastorm", "deltalake", "torchrec", "safetensors", "optuna", "pandas", "rich")
helps("bench", "explain", "report", "synth", "plan")
refused("table", "show", "nowhere")
refused("trainer", "train", "--data", "nowhere", "--run-dir", "run")
refused("serve", "serve", "nowhere", "--port", "0")
code, out, err = called("bench", given[0], "--batch-size", "512", "--reader", "arrow", "--workers", "ray://127.0.0.1:1")
assert code == 2 and err.strip().endswith('pip install "sluice-recsys[ray]"'), (out, err)
code, out, err = called("bench", given[0], "--batch-size", "512", "--seconds", "0.2", "--tuning", "auto")
assert code == 0 and '"tuning": "auto"' in out, (out, err)
code, out, err = called("bench", given[0], "--batch-size", "512", "--tuning", "even")
assert code == 2 and "benchmarks/rivals of the repository" in err, (out, err)
""",
        f"{files}/*.parquet",
    )
    said = (
        "sluice: row groups are read by the plain Arrow reader, because petastorm is not installed; "
        "the rows and their order are the same"
    )
    assert re.findall(r".*petastorm.*", done.stderr) == [said], done.stderr


WATCHED = """
import os, sys
given, leave, started = sys.argv[1:], os._exit, []
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
sys.addaudithook(lambda event, words: started.append((event, str(words))) if event in STARTS else None)
"""


def test_from_an_import_to_a_first_tuned_batch_nothing_is_loaded_or_started_that_is_not_needed(
    site, files
):
    """`import sluice` is for a command's completion and for scripts that then do something else; a first batch needs
    torch, Arrow and the kernel, and no compiler, Java or other program: none is on the path."""
    run(
        site(),
        """
import sluice
assert not {"numpy", "pyarrow", "torch"} & sys.modules.keys()
assert {name for name in sys.modules if name.startswith("sluice.")} == set()
assert started == [], started
import torch
started.clear()  # torch's builds for GPUs run ldconfig to find their libraries
from sluice import Loader
with Loader(given[0], batch_size=512, tuning="auto") as loader:
    batch = next(iter(loader))
    assert batch.rows == 512 and loader.tuning.mode == "auto", loader.tuning
slow = ("pandas", "scipy", "torch._dynamo", "torch._inductor", "sluice.dlrm", "sluice.etl.spark")
assert not set(slow) & sys.modules.keys(), set(slow) & sys.modules.keys()
assert started == [], started
""",
        f"{files}/*.parquet",
        prelude=WATCHED,
        PATH="",
    )


def test_where_nothing_can_be_written_a_loader_works_and_says_nothing_about_it(site, files):
    """As in a container with a read-only file system: neither beside the sources nor in the user's cache."""
    folder = site()
    wheel = folder / "sluice"
    copy = folder.parent / "copy"
    shutil.copytree(wheel, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for place in {path.parent for path in copy.rglob("*.py")}:
        (
            place / "__pycache__"
        ).touch()  # where a file is, there can be no folder; root might write into any other
    wheel.unlink()
    wheel.symlink_to(copy)
    done = run(
        folder,
        LOAD.format(more=", hash={'c': 100}, roles='label=label;dense=d;sparse=c'"),
        f"{files}/*.parquet",
        XDG_CACHE_HOME="/dev/null/nowhere",
    )
    assert "compile" not in done.stderr


@pytest.fixture
def table(tmp_path):
    """A feature table in the folder where `run` works."""
    work = tmp_path / "work"
    work.mkdir()
    return small_table(work / "table", rows=4096)


def test_petastorm_is_taken_where_it_is_installed(site, files):
    done = run(
        site("petastorm"),
        LOAD.format(more="")
        + LOAD.format(more=', reading=Reading(reader="petastorm")')
        + """
assert "petastorm.reader" in sys.modules and not any(name.startswith("pyspark") for name in sys.modules)
absent("deltalake", "torchrec")
""",
        f"{files}/*.parquet",
    )
    assert "plain Arrow reader" not in done.stderr


def test_trainer_trains_by_petastorms_reader_and_evaluates(site, table):
    run(
        site("trainer"),
        """
absent("uvicorn", "optuna", "scipy")
helps("train", "evaluate", "plan")
refused("serve", "serve", "run", "--port", "0")
code, out, err = called("train", "--data", "table", "--run-dir", "run", "--batch-size", "512", "--tuning", "fixed")
assert code == 0 and "plain Arrow reader" not in err, (out, err)
assert '"reader": "petastorm"' in open("run/events.jsonl").read()
code, out, err = called("evaluate", "--run-dir", "run")
assert code == 0 and "auc" in out, (out, err)
""",
    )


PROGRAMS = {
    "table": """
from sluice import FeatureTable
absent("petastorm", "torchrec", "pandas")
assert FeatureTable.open("table").files
code, out, err = called("show", "table")
assert code == 0 and "label" in out, (out, err)
code, out, err = called("check", "table")
assert code == 0, (out, err)
""",
    "etl": """
import pkgutil, subprocess
import sluice.etl.spark
absent("petastorm", "torchrec")
imports("pyspark.sql", *(m.name for m in pkgutil.walk_packages(sluice.etl.spark.__path__, "sluice.etl.spark.")))
done = subprocess.run((sys.executable, "-S", "-m", "sluice.etl.job", "--help"), capture_output=True, text=True)
assert done.returncode == 0 and "--spec" in done.stdout, (done.stdout, done.stderr)
""",
    "serve": """
absent("optuna")
imports("sluice.dlrm.serving.server")
helps("serve")
""",
    "tuning": """
absent("petastorm", "uvicorn", "torchrec", "deltalake", "optuna", "scipy")
from sluice.agent import policies
assert policies.names() == list(policies.PRODUCT)
for name in policies.names():
    policies.make(name)
""",
}


@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_extra_holds_what_its_programs_need(site, table, extra):
    run(site(extra), PROGRAMS[extra])
