"""Calls the compiled inner loops with drawn and damaged bytes: `python -m tests.kernel_fuzz --cases 1000000`.

Run with `--sanitizers`, it first builds a library of its own with the address and undefined-behaviour sanitizers, and
calls that one. Each access beyond the memory that a caller gave then ends the process with a report. Checksums are off,
so damage reaches the code that reads it.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import kernel_build
from sluice.common import native
from sluice.ingest.flow.place_rows import (
    DOUBLES_TO_FLOATS,
    IDS,
    LONGS_TO_FLOATS,
    LONGS_TO_IDS,
    PLACED,
    WORDS,
    WORDS_TO_FLOATS,
)
from tests.product import BAGS, COLUMN, FUNCTIONS, PART, READ_BEYOND, Scratch, call_kernel
from tests.thrift_structs import varint

SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_CODECS = {0: None, 1: "snappy", 6: "zstd", 7: "lz4_raw"}


def memory(content: bytes, beyond: int = READ_BEYOND) -> np.ndarray:
    """Returns bytes in memory of their own, of which `beyond` more may be read."""
    return np.frombuffer(bytearray(content + bytes(beyond)), np.uint8)


def drawn_struct(chance: random.Random, depth: int = 0) -> bytes:
    """Returns a struct of Thrift's compact protocol, of any fields."""
    out = b""
    for _ in range(chance.randrange(5)):
        kind = chance.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, chance.randrange(16)])
        step = chance.randrange(1, 16) if chance.random() < 0.9 else 0
        out += bytes([step << 4 | kind]) + (b"" if step else varint(chance.randrange(2**20)))
        if kind == 3:
            out += b"x"
        elif kind == 7:
            out += bytes(8)
        elif kind in (4, 5, 6):
            out += varint(chance.choice([0, 5, 2**31, 2**62, 2**70]))
        elif kind == 8:
            size = chance.choice([0, 3, 2**40])
            out += varint(size) + b"abc"[: min(size, 3)]
        elif kind in (9, 10):
            size = chance.randrange(4)
            out += bytes([size << 4 | 5]) + b"".join(varint(7) for _ in range(size))
        elif kind == 12 and depth < 12:
            out += drawn_struct(chance, depth + 1)
    return out + b"\0"


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Returns bytes of which a few are others, in two of three cases."""
    changed = bytearray(content)
    for _ in range(chance.choice([0, 1, 3])):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(
        changed[: chance.randrange(len(changed) + 1)] if chance.random() < 0.1 else changed
    )


def try_footer(chance: random.Random) -> bool:
    content = damaged(drawn_struct(chance), chance)
    numbers = np.empty((chance.choice([0, 3, 128, 128, 128]), 2), np.int64)
    stop = np.zeros(1, np.int64)
    raw = memory(content, 0) if content else np.zeros(1, np.uint8)
    count = call_kernel("thrift_numbers", raw, 0, len(content), numbers, len(numbers), stop)
    assert count <= len(numbers)
    return count >= 0


def page_head(kind: int, unpacked: int, stored: int, values: int, encoding: int) -> bytes:
    """Returns the head of a page without a checksum."""

    def number(step: int, value: int) -> bytes:
        return bytes([step << 4 | 5]) + varint(value << 1)

    fields = number(1, kind) + number(1, unpacked) + number(1, stored)
    inner = number(1, values) + number(1, encoding) + number(1, 3) + number(1, 3) + b"\0"
    return fields + bytes([(2 if kind == 0 else 4) << 4 | 12]) + inner + b"\0"


def drawn_indices(chance: random.Random, rows: int, distinct: int) -> bytes:
    bits = max(1, (distinct - 1).bit_length())
    out, left = bytes([bits]), rows
    while left > 0:
        if chance.random() < 0.5:
            run = chance.randrange(1, left + 1)
            out += varint(run << 1) + chance.randrange(distinct).to_bytes((bits + 7) // 8, "little")
            left -= run
        else:
            groups = chance.randrange(1, left // 8 + 2)
            packed = 0
            for n in range(8 * groups):
                packed |= chance.randrange(distinct) << (n * bits)
            out += varint(groups << 1 | 1) + packed.to_bytes(groups * bits, "little")
            left -= 8 * groups
    return out


def drawn_chunk(chance: random.Random, rows: int, width: int, codec: int) -> bytes:
    """Returns the pages of a column: perhaps a dictionary, then values or indices."""

    def packed(content: bytes) -> bytes:
        name = _CODECS[codec]
        return pa.Codec(name).compress(content, asbytes=True) if name else content

    out, distinct = b"", 0
    if chance.random() < 0.6:
        distinct = chance.choice([1, 2, 200, 300, 70_000 // width])
        words = chance.randbytes(distinct * width)
        stored = packed(words)
        out += page_head(2, len(words), len(stored), distinct, 0) + stored
    while rows:
        some = chance.randrange(1, rows + 1)
        content = (
            drawn_indices(chance, some, distinct) if distinct else chance.randbytes(some * width)
        )
        if chance.random() < 0.05:  # fewer values than its head says
            content = content[: chance.randrange(1, len(content) + 1)]
        stored = packed(content)
        out += page_head(0, len(content), len(stored), some, 8 if distinct else 0) + stored
        rows -= some
    return out


def targets_of(chance: random.Random, columns: np.ndarray, rows: int) -> dict[str, Any]:
    """Gives columns places in batches, and draws the parts of rows that go there. Returns the arguments of a call."""
    each = chance.randrange(1, 40)
    first = chance.randrange(3 * each)
    columns["offset"] = 4 * each * np.arange(len(columns))
    parts, at = [], 0
    while at < rows:
        some = chance.randrange(1, rows - at + 1)
        before, after = chance.randrange(9), chance.randrange(9)
        parts.append((before + some + after, before, before + some, at, first, 0))
        at += some
    most = max(window for window, *_ in parts)
    steps = (first + most) // each + 1
    blocks = np.zeros((steps, len(columns), each), np.int32)
    held: list[np.ndarray] = [blocks]
    described = []
    for part in parts:
        window = part[0]
        size = window + chance.randrange(20)
        outer, inner = (
            np.random.default_rng(n).permutation(size).astype(np.uint32) for n in (1, 2)
        )
        places = np.random.default_rng(3).permutation(window).astype(np.uint32)
        held += [outer, inner, places]
        order = chance.choice(
            [
                (0, 0, 0, 0),
                (outer.ctypes.data, inner.ctypes.data, size, 0),
                (0, 0, 0, places.ctypes.data),
            ]
        )
        described.append((*part, *order))
    addresses = np.uint64(blocks.ctypes.data) + np.arange(steps, dtype=np.uint64) * np.uint64(
        blocks.strides[0]
    )
    targets = np.zeros((steps, 4), np.uint64)
    targets[:, 0] = addresses
    return {
        "parts": np.array(described, PART),
        "rows": rows,
        "each": each,
        "first_step": 0,
        "targets": targets,
        "held": held,
    }


def find_pages(content: bytes, rows: int) -> None:
    """Finds the pages in a file, which are in order and within it, or are refused."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        found = np.empty((rows + 3, 4), np.int64)
        places = file.fileno(), 0, len(content), rows
        count = call_kernel("find_pages", *places, found, len(found))
    assert count <= len(found)
    if count >= 0:
        assert (np.diff(found[:count, :2], axis=0)[1:] >= 0).all()
        assert found[count - 1, :2].tolist() == [rows, len(content)]


def try_pages(chance: random.Random) -> bool:
    """Takes damaged columns of a row group, or of a piece of one, to their places."""
    rows, count = chance.randrange(1, 2000), chance.randrange(1, 6)
    columns, held = np.zeros(count, COLUMN), []
    for column in columns:
        kind = chance.choice([WORDS, IDS, WORDS_TO_FLOATS, DOUBLES_TO_FLOATS, LONGS_TO_IDS])
        width = 8 if kind >= DOUBLES_TO_FLOATS else 4
        codec = chance.choice([c for c in _CODECS if c == 0 or FUNCTIONS[c]])
        skip, more = (chance.randrange(50) for _ in range(2)) if chance.random() < 0.3 else (0, 0)
        content = damaged(drawn_chunk(chance, rows + skip + more, width, codec), chance)
        held.append(data := memory(content))
        find_pages(content, rows + skip + more)
        column["pages"], column["size"] = data.ctypes.data, len(content)
        column["width"], column["kind"], column["codec"] = width, kind, codec
        column["is_optional"] = chance.random() < 0.1
        column["must_be_finite"] = kind != IDS and chance.random() < 0.2
        column["skip"], column["rows"] = skip, rows + skip + more
        column["most"] = rows + skip + more + chance.choice([0, 1000])
    how = targets_of(chance, columns, rows)
    held += how.pop("held")
    state, _, _ = Scratch().place(columns, np.zeros(0, BAGS), how.pop("parts"), **how)
    assert state == columns["state"].max()
    return bool((columns["state"] == PLACED).any())


def try_snappy(chance: random.Random) -> bool:
    period = chance.randrange(1, 14)
    content = (chance.randbytes(period) * 400)[: chance.randrange(1, 400)] + chance.randbytes(9)
    packed = damaged(pa.Codec("snappy").compress(content, asbytes=True), chance)
    source, into = memory(packed), memory(bytes(len(content)))
    places = source, len(packed), into, len(content)
    return bool(call_kernel("unpack_page", 1, FUNCTIONS, *places))


def try_lines(chance: random.Random) -> bool:
    """Cuts drawn lines, and gives their texts codes."""
    parts = [
        b"1",
        b"-7",
        b"a",
        b"\t",
        b"\t",
        b"\r",
        b'"',
        b"\xef\xbb\xbf",
        b"\xc3\xa9",
        b"9" * 19,
        b"w" * 20,
    ]
    lines = [
        b"".join(chance.choices(parts, k=chance.randrange(8)))
        + (b"" if chance.random() < 0.02 else b"\n")
        for _ in range(chance.randrange(1, 40))
    ]
    bounds = np.cumsum([0, *map(len, lines)]).astype(np.int32)
    data = memory(b"".join(lines) or b"\n", 0)
    is_int = np.array(chance.choices([True, False], k=chance.randrange(1, 5)))
    shape = len(is_int), len(lines)
    starts, sizes = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    values, irregular = np.zeros(shape, np.int64), np.zeros(len(lines), bool)
    how = len(is_int), 9, chance.choice([-1, 34]), chance.choice([128, 256])
    rows = call_kernel(
        "cut_lines", data, bounds, len(lines), is_int, *how, starts, sizes, values, irregular
    )
    assert rows == len(lines) - irregular.sum()
    codes, first = np.zeros(max(rows, 1), np.int32), np.zeros(max(rows, 1), np.int32)
    cells = starts[0, :rows].copy(), sizes[0, :rows].copy(), values[0, :rows].copy()
    count = call_kernel("encode_texts", data, *cells, rows, codes, first)
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(cells[1][first[:count]], out=ends[1:])
    texts = np.zeros(max(1, int(ends[-1])), np.uint8)
    call_kernel("gather_texts", data, cells[0][first[:count]], ends, count, texts)
    return rows > 0


def try_move(chance: random.Random) -> bool:
    """Moves columns of drawn kinds from memory to batches."""
    draw = np.random.default_rng(chance.randrange(2**32))
    rows = int(draw.integers(1, 200))
    columns, held = np.zeros(draw.integers(1, 11), COLUMN), []
    for column in columns:
        kind = int(draw.choice([WORDS, IDS, DOUBLES_TO_FLOATS, LONGS_TO_FLOATS, LONGS_TO_IDS]))
        size = rows * (8 if kind >= DOUBLES_TO_FLOATS else 4)
        held.append(draw.integers(0, 2, size, np.uint8) * chance.choice([1, 127]))
        column["values"], column["kind"] = held[-1].ctypes.data, kind
    how = targets_of(chance, columns, rows)
    held += how.pop("held")
    _, _, moved = Scratch().place(columns, np.zeros(0, BAGS), how.pop("parts"), **how)
    assert moved.sum() == rows
    return True


def try_hashes(chance: random.Random) -> bool:
    texts = [chance.randbytes(chance.randrange(30)) for _ in range(chance.randrange(1, 20))]
    offsets = np.cumsum([0, *map(len, texts)]).astype(chance.choice([np.int32, np.int64]))
    data = memory(b"".join(texts), 0) if offsets[-1] else np.zeros(1, np.uint8)
    hashes = np.empty(len(texts), np.uint64)
    wide = offsets.itemsize == 8
    call_kernel("hash_texts", data, offsets, wide, len(texts), chance.randrange(2**64), hashes)
    numbers = np.array([chance.randrange(-(2**63), 2**63) for _ in texts])
    call_kernel("hash_digits", numbers, chance.random() < 0.5, len(numbers), 0, hashes)
    return True


TRIES: dict[str, Callable[[random.Random], bool]] = {
    "footers": try_footer,
    "pages": try_pages,
    "snappy": try_snappy,
    "lines": try_lines,
    "moves": try_move,
    "hashes": try_hashes,
}


def run_cases(names: Sequence[str], cases: int, seed: int) -> Counter[str]:
    """Runs so many cases of these parts in turns. Returns how many each part did not refuse."""
    understood: Counter[str] = Counter()
    for number in range(cases):
        name = names[number % len(names)]
        try:
            understood[name] += TRIES[name](random.Random(f"{seed} {number}"))
        except AssertionError:
            print(f"case {number} of seed {seed} ({name})", file=sys.stderr)
            raise
    return understood


def run_with_sanitizers(words: list[str]) -> int:
    """Runs this program in a process whose library checks each access to memory. Returns its exit code."""
    compiler = kernel_build.find_compiler()
    assert compiler, "there is no C compiler"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        kernel_build.build(library, SANITIZERS)
        runtime = [
            subprocess.run(
                [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        return subprocess.run(
            [sys.executable, "-m", "tests.kernel_fuzz", *words, "--library", str(library)],
            env={
                **os.environ,
                "LD_PRELOAD": " ".join(runtime),
                "ASAN_OPTIONS": "detect_leaks=0",
                "PYTHONMALLOC": "malloc",
            },
            check=False,
        ).returncode


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TRIES)
    parser.add_argument("--sanitizers", action="store_true")
    parser.add_argument(
        "--library", type=Path, help="the library to call, if not the installed one"
    )
    args = parser.parse_args(words)
    if args.sanitizers:
        return run_with_sanitizers([word for word in words if word != "--sanitizers"])
    if args.library:
        native.LIBRARY = args.library
    understood = run_cases([args.only] if args.only else [*TRIES], args.cases, args.seed)
    shares = ", ".join(f"{name} {count}" for name, count in understood.items())
    print(f"{args.cases} cases, of which were understood: {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
