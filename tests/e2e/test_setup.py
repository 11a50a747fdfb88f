"""Set-up on a machine that lacks something: one clear line, exit code 2, and no environment half made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.raises import assert_names

TOOLS = ("bash", "dirname", "id", "sed", "grep", "cat", "sha256sum", "cut", "rm", "env")
JAVA_17 = "echo 'openjdk version \"17.0.1\" 2021-10-19' >&2"


@pytest.fixture
def machine(tmp_path, repo):
    """A checkout on a bare machine: a few tools on the path, no apt, no Java, no Python unless a test adds them."""
    home = tmp_path / "checkout"
    (home / ".ci").mkdir(parents=True)
    for name in (
        ".ci/setup",
        "pyproject.toml",
        "setup.py",
        "requirements.lock",
        "requirements-dev.lock",
    ):
        shutil.copy(repo / name, home / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    return home


def add(home: Path, name: str, script: str) -> None:
    path = home.parent / "bin" / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def set_up(home: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", ".ci/setup"],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": str(home.parent / "bin"), "HOME": os.environ.get("HOME", "/")},
    )


@pytest.mark.parametrize(
    ("version", "named"),
    [
        (None, "none"),
        ('openjdk version "11.0.2" 2019-01-15', "11"),
    ],
)
def test_without_a_java_that_spark_can_use_it_says_what_to_install_and_goes_on(
    machine, version, named
):
    """Up to the next thing that is missing, a Python: what needs no Spark needs no Java."""
    if version:
        add(machine, "java", f"echo '{version}' >&2")
    result = set_up(machine)
    assert_names(
        result.stderr,
        "Java 17",
        f"found {named}",
        "apt-get install openjdk-17-jre-headless",
        "Python 3.11 to 3.13",
    )


def test_without_a_new_enough_python_it_says_what_to_install(machine):
    add(machine, "java", JAVA_17)
    add(machine, "python3", 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    result = set_up(machine)
    assert result.returncode == 2
    assert_names(result.stderr, "Python 3.11 to 3.13", "Python 3.9.2")
    assert not (machine / ".venv").exists()


def test_a_failed_download_leaves_no_stamp_so_the_next_call_goes_on(machine):
    add(machine, "java", JAVA_17)
    add(
        machine,
        "python3.11",
        """
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin && printf '#!/bin/bash\\nexit 1\\n' > .venv/bin/python && chmod +x .venv/bin/python;;
esac""",
    )
    for tool in ("mkdir", "chmod"):
        (machine.parent / "bin" / tool).symlink_to(shutil.which(tool))
    assert set_up(machine).returncode != 0
    assert not (machine / ".venv/.stamp").exists()


def test_a_second_call_does_nothing(machine):
    add(machine, "java", JAVA_17)
    (machine / ".venv/bin").mkdir(parents=True)
    python = machine / ".venv/bin/python"
    python.write_text("#!/bin/bash\necho called >> calls\n")
    python.chmod(0o755)
    sources = "requirements.lock requirements-dev.lock pyproject.toml setup.py .ci/setup"
    made = f"cat {sources} | sha256sum | cut -c1-16 > .venv/.stamp"  # as if set-up had been there
    subprocess.run(made, shell=True, cwd=machine, check=True)
    assert set_up(machine).returncode == 0
    assert (machine / "calls").read_text() == "called\n", "only to see whether the kernel is built"
    (machine / "calls").unlink()
    (machine / "requirements.lock").write_text("changed")
    (machine.parent / "bin/python3.11").write_text("#!/bin/bash\nexit 0\n")
    (machine.parent / "bin/python3.11").chmod(0o755)
    set_up(machine)
    assert (machine / "calls").exists(), "changed locks were not noticed"
