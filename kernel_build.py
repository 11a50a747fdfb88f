"""Builds the compiled inner loops of Sluice: `python kernel_build.py`.

This module is also the build backend of pyproject.toml: setuptools, which also asks for `ziglang`, a C compiler in a
wheel, where the machine has no other. It imports the standard library only, because it runs before anything is
installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "sluice" / "common" / "native" / "kernel.c"
LIBRARY = SOURCE.with_name("kernel.so")
COMPILERS = ("cc", "gcc", "clang")
COMPILER_IN_A_WHEEL = "ziglang"
_OPTIONS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-sanitize=undefined", "-fPIC", "-shared")
"""No option may let the compiler fuse or reorder operations on floats: the bits are part of the contract."""
_OPTIONS_X86_64 = ("-msse4.2", "-mpopcnt")


def source_digest() -> str:
    """Returns the digest of the source. The library carries it, and is not used beside another source."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:32]


def find_compiler() -> list[str] | None:
    """Returns the words that call a C compiler: of the variable CC, of the machine, or of the wheel."""
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec(COMPILER_IN_A_WHEEL) is not None:
        return [sys.executable, "-m", COMPILER_IN_A_WHEEL, "cc"]
    return None


def build(library: Path, extra: tuple[str, ...] = ()) -> None:
    """Compiles the kernel to the file `library`, which appears as a whole. `extra` are more options."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit(
            f"no C compiler was found ({', '.join(COMPILERS)}), and the variable CC names none; install one (Debian, "
            f"Ubuntu: apt-get install gcc libc6-dev), or pip install {COMPILER_IN_A_WHEEL}, and try again"
        )
    of_machine = _OPTIONS_X86_64 if _target_of(compiler).startswith(("x86_64", "AMD64")) else ()
    made = library.with_name(f"{library.name}.{os.getpid()}")
    digest = f'-DSOURCE_DIGEST="{source_digest()}"'
    words = [*compiler, *_OPTIONS, *of_machine, *extra, digest, "-o", str(made), str(SOURCE)]
    try:
        subprocess.run(words, check=True)
        os.replace(made, library)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{shlex.join(words)}: exit code {error.returncode}") from error
    finally:
        made.unlink(missing_ok=True)


def _target_of(compiler: list[str]) -> str:
    """Returns the kind of machine that a compiler compiles for, which may be another than this one."""
    told = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or platform.machine()


def _with_compiler(needs: list[str]) -> list[str]:
    return needs if find_compiler() else [*needs, COMPILER_IN_A_WHEEL]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    from setuptools import build_meta

    return _with_compiler(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    from setuptools import build_meta

    return _with_compiler(build_meta.get_requires_for_build_editable(config_settings))


def __getattr__(name: str) -> Any:
    """Returns the other hooks of a build backend, which are those of setuptools."""
    if name.startswith("__"):
        raise AttributeError(name)
    from setuptools import build_meta

    return getattr(build_meta, name)


if __name__ == "__main__":
    # The library carries the digest of its sources.
    if not (LIBRARY.exists() and source_digest().encode() in LIBRARY.read_bytes()):
        build(LIBRARY)
