"""What every test gets: a scrubbed environment, and a check that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from hypothesis import settings

from tests import browser, processes
from tests.run_program import run_program

if TYPE_CHECKING:
    from tests.dlrm.forks import Forks

settings.register_profile("sluice", deadline=None)  # timings say nothing on a busy machine
settings.load_profile("sluice")

_KEEP = {
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "JAVA_HOME",
    "TMPDIR",
    "VIRTUAL_ENV",
    "CI",
    "PYSPARK_PYTHON",
    "USER",
    "TERM",
}
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_PATIENCE_S = 30.0
_TEMPORARY = pytest.StashKey[str]()
_SHARED = re.compile(r"def \w+\([^)]*\b(spark|transformed|hostile|wheel)\b")
"""A test's parameter that is dear to make, once in a process: the files that share it are one group."""
_SESSIONS = 2
"""The Spark files are two groups: one group would take longer than all other files together take on two cores."""
_DEAREST = (
    "tests/e2e/test_demo.py",
    "tests/dlrm/test_hosts.py",
    "tests/dlrm/test_follow.py",
    "tests/e2e/test_demo_schema.py",
    "tests/dlrm/test_ranks.py",
    "tests/etl/test_cluster.py",
    "tests/dlrm/test_elastic.py",
    "tests/e2e/test_readme.py",
    "tests/frozen/test_frozen.py",
    "tests/dlrm/serving/test_serve.py",
    "tests/dlrm/test_foreign_training.py",
    "tests/dlrm/test_guess_trains.py",
    "tests/dlrm/serving/test_serving.py",
    "tests/dlrm/test_train.py",
    "tests/ingest/test_histories.py",
    "tests/dlrm/test_bucket.py",
    "tests/dlrm/test_checkpoint_storm.py",
    "tests/storm/test_storm.py",
    "tests/etl/local/test_engines.py",
    "tests/etl/test_serving.py",
    "tests/etl/test_large.py",
    "tests/etl/test_lines.py",
    "tests/etl/test_jobs.py",
    "tests/etl/test_build.py",
    "tests/etl/test_fuzz.py",
)
"""The files that need most of the processors' time, dearest first, as measured on 27 November 2026. Processes take
them first, so that quick files fill up the end. Those of a Spark session are ordered by themselves."""
# A library's own helpers that live as long as the process: each says whose they are.
_FOREIGN_THREADS = (
    "ThreadPoolExecutor-pyarrow",
    "py4j",
    "Thread-serve-py4j",
    "pyarrow",
    "pytest_timeout",
    "tokio",
    "fsspecIO",
    "deltalake",
)
# Of pytest, of Java, and of torch, whose compiler makes a folder when torchrec is first imported.
_FOREIGN_FILES = ("pytest-of-", "hsperfdata", "torchinductor_")


def pytest_configure(config: pytest.Config) -> None:
    """A temporary folder of this run's own: what another program leaves in the shared one is not this run's fault.

    Interrupts work also where a shell began the run in the background, so that it would ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all tests are imported: they live as long as the process
    config.stash[_TEMPORARY] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="sluice-tests-")
    tempfile.tempdir = None


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_TEMPORARY], ignore_errors=True)


@functools.cache
def _groups() -> dict[str, str]:
    """Returns all files with tests in the order in which processes take them, each with its group's name."""
    root = Path(__file__).parent.parent
    texts = {
        str(path.relative_to(root)): path.read_text()
        for path in sorted((root / "tests").rglob("test_*.py"))
    }
    shared = {
        name: match[1] if (match := _SHARED.search(text)) else name for name, text in texts.items()
    }
    ranks = {name: rank for rank, name in enumerate(_DEAREST)}
    ordered = sorted(
        texts,
        key=lambda name: (
            shared[name] != "spark",
            ranks.get(name, len(ranks)),
            "pytest.mark.slow" not in texts[name],
        ),
    )
    return {
        name: f"spark {number % _SESSIONS}" if shared[name] == "spark" else shared[name]
        for number, name in enumerate(ordered)
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        order = {name: place for place, name in enumerate(_groups())}
        items.sort(key=lambda item: order[item.nodeid.split("::")[0]])


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # no later collection looks through what was imported


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns one queue of groups of files for all processes. (xdist's own groups need a private name of pytest that
    pytest 9.2 no longer has.)"""
    from xdist.scheduler import LoadScopeScheduling

    class FileGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _groups()[nodeid.split("::")[0]]

    config.option.loadscopereorder = False  # keeps the order of `_groups`
    return FileGroups(config, log)


@pytest.fixture(autouse=True)
def scrubbed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on a variable that the caller happens to have set. Java compiles quickly
    rather than well what is short-lived."""
    for name in list(os.environ):
        if name not in _KEEP and not name.startswith(("PYTEST_", "COV_")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", _JAVA_OPTIONS)


def _descriptors() -> dict[int, str]:
    opened = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            opened[int(entry.name)] = os.readlink(entry.path)
        except OSError:
            continue
    return opened


def _children() -> list[psutil.Process]:
    """The processes below this one. Mostly it has none, which the kernel says at once; psutil reads all processes."""
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if task.read_text():
                children = psutil.Process().children(recursive=True)
                return [child for child in children if not _is_below_a_browser(child)]
    return []


def _is_below_a_browser(process: psutil.Process) -> bool:
    """Whether a browser of the tests started it: a browser starts and ends processes of its own at any time.

    The browser itself is counted, and its process group ends with it."""
    if not browser.RUNNING:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(parent.pid in browser.RUNNING for parent in process.parents())
    return True  # it ended meanwhile


def _what_is_there() -> dict[str, set[str]]:
    return {
        "threads": {
            f"{t.name} ({t.ident})"
            for t in threading.enumerate()
            if not t.name.startswith(_FOREIGN_THREADS)
        },
        "children": {f"{p.pid} {processes.name(p)}" for p in _children() if processes.alive(p)},
        # Sockets and event descriptors of Spark's gateway and of torch's stores are counted with their owners.
        "descriptors": {
            f"{fd} {target}"
            for fd, target in _descriptors().items()
            if target.startswith("/")
            and not target.startswith(("/dev/", "/proc/", "/sys/"))
            and "/site-packages/" not in target
        },
        "shared memory": set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set(),
        "temporary files": {
            n for n in os.listdir(tempfile.gettempdir()) if not n.startswith(_FOREIGN_FILES)
        },
    }


def _held_by_strangers() -> set[str]:
    """The shared memory of all processes but this one and its children: another run of tests has its own."""
    ours = {os.getpid(), *(child.pid for child in _children())}
    held: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if (
                int(maps.parent.name) not in ours
            ):  # by numbers: a semaphore is mapped under another name
                held.update(map(int, re.findall(r" (\d+) +/dev/shm/", maps.read_text())))
    return {entry.name for entry in os.scandir("/dev/shm") if entry.inode() in held}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest):
    """Fails a test that leaves a thread, child process, open file, shared-memory segment or temporary file behind.

    What a session-wide fixture starts (Spark) is there before the test and so not counted."""
    if request.node.get_closest_marker("spark"):
        yield  # a session shared by many tests comes up inside the first of them
        return
    before = _what_is_there()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    for look in itertools.count():
        left = {kind: new for kind, now in _what_is_there().items() if (new := now - before[kind])}
        if "shared memory" in left and left["shared memory"] <= _held_by_strangers():
            del left["shared memory"]
        if not left or time.monotonic() > deadline:
            break
        if (
            look % 20 == 1
        ):  # most of it ends by itself, and sooner than all objects are looked through
            gc.collect()
        threading.Event().wait(0.02)
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def answers_to_signals():
    """A program that a test runs in this process answers an interrupt in its own way; the next test does not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, answer in before.items():
        if answer is not None:  # no library's own
            signal.signal(number, answer)


@pytest.fixture(scope="session")
def repo() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Begins trainers whose end alone matters, quickly."""
    from tests.dlrm.forks import Forks

    with Forks() as made:
        yield made


@pytest.fixture(scope="session")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout by way of its source archive, as an index gets both, built once for all tests."""
    out = tmp_path_factory.mktemp("wheel")
    copy = out / "checkout"
    copy.mkdir()
    without_caches = shutil.ignore_patterns("__pycache__")
    for name in ("sluice", "etl", "ingest", "agent", "dlrm"):  # as a clone has them, with its links
        shutil.copytree(repo / name, copy / name, symlinks=True, ignore=without_caches)
    for name in (
        "pyproject.toml",
        "setup.py",
        "kernel_build.py",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        shutil.copy(repo / name, copy)
    build = "import kernel_build; kernel_build.build_{}('..')"
    run_program("-c", build.format("sdist"), cwd=copy, check=True)
    shutil.unpack_archive(next(out.glob("*.tar.gz")), out / "source", filter="data")
    (source,) = (out / "source").iterdir()
    run_program("-c", build.format("wheel"), cwd=source, check=True)
    return next(out.glob("source/*.whl"))
