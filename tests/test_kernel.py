"""The compiled inner loops: how they are built, who may call them, and that they stay within their memory."""

import random
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest

import kernel_build
from benchmarks.small_table import small_table
from sluice import Loader
from sluice.common import native
from sluice.common.native import KernelError, call_kernel
from sluice.etl.ops import hashing
from tests import kernel_fuzz
from tests.raises import raises


@pytest.fixture
def fresh(monkeypatch):
    """Lets the next call look for the library again."""
    native._functions.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native._functions.cache_clear()


@pytest.mark.slow
def test_drawn_and_damaged_bytes_stay_within_their_memory_under_sanitizers():
    assert kernel_fuzz.main(["--cases", "4000", "--sanitizers"]) == 0


def test_drawn_bytes_reach_every_part_of_the_kernel():
    understood = kernel_fuzz.run_cases([*kernel_fuzz.TRIES], 600, 3)
    assert understood.keys() == kernel_fuzz.TRIES.keys()
    assert min(understood.values()) > 10


def test_without_a_library_the_loader_refuses_with_the_command(fresh, tmp_path):
    data = small_table(tmp_path / "t", rows=256)
    fresh.setattr(native, "LIBRARY", tmp_path / "kernel.so")
    assert not native.has_kernel()
    with raises(KernelError, "kernel.so", "is missing", "kernel_build.py"):
        Loader(data, batch_size=64)


def test_a_library_of_other_sources_is_refused_with_the_command(fresh, tmp_path):
    source = tmp_path / "kernel.c"
    source.write_text(native.SOURCE.read_text() + "\n")
    fresh.setattr(native, "SOURCE", source)
    with raises(KernelError, "kernel.so", "other sources", "kernel_build.py"):
        native.has_kernel()


def test_a_library_is_built_as_a_whole_or_not_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_build, "SOURCE", tmp_path / "kernel.c")
    (tmp_path / "kernel.c").write_text("this is no C")
    library = tmp_path / "kernel.so"
    library.write_bytes(b"as it was")
    with pytest.raises(SystemExit, match="exit code"):
        kernel_build.build(library)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".c"] == ["kernel.so"]
    assert library.read_bytes() == b"as it was"


@pytest.mark.parametrize(
    ("told", "has_sse"), [("x86_64-linux-gnu", True), ("aarch64-linux-gnu", False)]
)
def test_the_options_are_those_of_the_machine_that_is_compiled_for(
    *, monkeypatch, tmp_path, told, has_sse
):
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = -dumpmachine ] && echo {told} && exit\necho "$@" > {tmp_path}/words\n'
        'while [ "$1" != -o ]; do shift; done\ntouch "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    kernel_build.build(tmp_path / "kernel.so")
    assert ("-msse4.2" in (tmp_path / "words").read_text()) == has_sse


def test_without_a_compiler_one_in_a_wheel_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(kernel_build, "COMPILER_IN_A_WHEEL", "no_such_module")
    assert kernel_build.find_compiler() is None
    assert "no_such_module" in kernel_build.get_requires_for_build_wheel()
    assert "no_such_module" in kernel_build.get_requires_for_build_editable()
    with pytest.raises(SystemExit, match="pip install no_such_module"):
        kernel_build.build(tmp_path / "kernel.so")
    monkeypatch.setattr(kernel_build, "COMPILER_IN_A_WHEEL", "pyarrow")
    assert kernel_build.find_compiler() == [sys.executable, "-m", "pyarrow", "cc"]
    monkeypatch.setenv("CC", "ccache gcc")
    assert kernel_build.find_compiler() == ["ccache", "gcc"]


def test_an_array_with_gaps_is_refused():
    every_second = np.arange(8)[::2]
    with raises(ValueError, "contiguous"):
        call_kernel("lay_in_line", every_second, 4, 0, every_second, every_second)


@pytest.mark.parametrize("seed", range(20))
def test_hashes_are_those_of_numpy(monkeypatch, seed):
    """Texts of all lengths, missing ones, and parts of columns."""
    chance, salt = random.Random(seed), random.Random(seed).randrange(2**64)
    kind = chance.choice([pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
    texts = [
        None if chance.random() < 0.1 else "é1" * chance.randrange(chance.choice([2, 9, 40]))
        for _ in range(chance.choice([0, 1, 200]))
    ]
    column = pa.array(texts, kind).slice(chance.randrange(3))
    numbers = pa.array([chance.choice([None, 0, 7, 2**63 - 1]) for _ in range(40)], pa.int64())
    signed = pa.array([chance.choice([None, -1, -(2**63)]) for _ in range(40)], pa.int64())
    unsigned = pa.array([chance.choice([2**64 - 1, 10**19]) for _ in range(40)], pa.uint64())

    def all_hashes():
        whole = (hashing.hash_digits(some, salt) for some in (numbers, signed, unsigned))
        return [hashing.hash_texts(column, salt), *whole]

    ours = all_hashes()
    monkeypatch.setattr(hashing, "has_kernel", lambda: False)
    for one, other in zip(ours, all_hashes(), strict=True):
        assert one.tolist() == other.tolist()
