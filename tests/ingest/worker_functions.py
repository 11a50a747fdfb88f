"""What the tests run in worker processes. A function tells through pipes and files in $SLUICE_TEST_DIR what it does, so
that a test strikes while the worker holds an item, and never by waiting for a while."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from sluice import takes_matrix


def _folder() -> Path:
    return Path(os.environ["SLUICE_TEST_DIR"])


def _announce() -> None:
    """One line with our number into the pipe that the test reads. Lines of this length are atomic."""
    with open(_folder() / "held", "w") as pipe:
        pipe.write(f"{os.getpid()}\n")


def _stay() -> None:
    """Until a signal ends the process: a pause alone is over after any signal, also after one that asks for a stack."""
    while True:
        signal.pause()


def _attempt() -> int:
    """Which attempt this is, counted over all workers."""
    with open(_folder() / "attempts", "ab", buffering=0) as log:
        log.write(b".")
        return log.tell()


def double(columns):
    return {name: array * 2 for name, array in columns.items()}


def plus(columns):
    columns["I1"] += 1.0


def minus(columns):
    columns["I1"] -= 3.0


def threads_of_torch(columns):
    import torch  # most of what is here needs none

    columns["I1"][:] = torch.get_num_threads()


def twice(columns):
    return {"I1": columns["I1"] * 2}


def waits(columns):
    """Four milliseconds without a core, whatever the machine does."""
    threading.Event().wait(0.004)


def grow(columns):
    return {"out": np.full(int(columns["count"][0]), 7.0)}


def hold_first(columns):
    """The first attempt holds the item until a signal ends it."""
    if _attempt() == 1:
        _announce()
        _stay()
    return double(columns)


def hold_each_once(columns):
    """Each item's first attempt holds it: attempts are distinguished by a file per item."""
    mark = _folder() / f"seen-{int(columns['item'][0])}"
    if not mark.exists():
        mark.touch()
        _announce()
        _stay()
    return double(columns)


def hold(columns):
    _attempt()
    _announce()
    _stay()


def hold_until_told(columns):
    _attempt()
    _announce()
    with open(_folder() / "go", "rb", buffering=0) as pipe:
        pipe.read(1)
    return double(columns)


def stuck_in_native_code(columns):
    """Holds the interpreter lock for ever."""
    _announce()
    re.match(r"(a+)+$", "a" * 60 + "b")


def hold_with_helper(columns):
    """Has started a program of its own, whose number it tells."""
    helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with open(_folder() / "held", "w") as pipe:
        pipe.write(f"{os.getpid()} {helper.pid}\n")
    _stay()


def crash(columns):
    _attempt()
    os.kill(os.getpid(), signal.SIGSEGV)


def write_in_place(columns):
    """Writes one, swaps two, makes one from another's memory, leaves one alone."""
    columns["written"][:] = 7
    return {"a": columns["b"], "b": columns["a"], "backwards": columns["untouched"][::-1]}


class Unpicklable(Exception):
    def __init__(self):
        super().__init__(lambda: None)

    def __reduce__(self):
        raise RuntimeError("not to be pickled")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def fail(columns):
    kind = bytes(columns["kind"]).decode()
    if kind == "value":
        raise ValueError("row 5 is bad")
    if kind == "unpicklable":
        raise Unpicklable
    if kind == "huge":
        raise ValueError("ü" * 10_000_000)
    if kind == "mute":
        raise Mute
    if kind == "exit":
        sys.exit(3)
    if kind == "list":
        return [1, 2]
    if kind == "objects":
        return {"out": np.array([object()])}
    return columns


def hold_deaf(columns):
    """Holds the item and hears no signal but SIGKILL: as a user's function may do."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    _announce()
    _stay()


def interrupt_parent(columns):
    """As a Ctrl-C would, in the middle of the first item."""
    if _attempt() == 1:
        os.kill(os.getppid(), signal.SIGINT)
        _stay()
    return double(columns)


def shifted(columns):
    """The columns that each back end must return."""
    columns["I1"] += 1
    return {"C1": columns["C1"] ^ 1}


def shifted_without_memory_at_first(columns):
    columns["I1"] += 1
    if _attempt() == 1:
        raise MemoryError("not now")
    return {"C1": columns["C1"] ^ 1}


def keep_100_mib(columns, _kept=[]):  # noqa: B006  what lies here stays
    """Takes 100 MiB with its first item, and keeps them."""
    if not _kept:
        _kept.append(np.ones(100 * 2**20, np.uint8))


def boundless(columns):
    _attempt()
    np.ones(2**45, np.uint8)


def shifted_after_hold(columns):
    """The very first attempt holds its batch until a signal ends it."""
    if _attempt() == 1:
        _announce()
        _stay()
    return shifted(columns)


def fails_on_odd_labels(columns):
    """Writes first, so that a caller must not trust what it finds after a failure."""
    columns["I1"] += 1
    if (columns["label"] > 0.5).any():
        raise ValueError("a label is 1")


def only_two(columns):
    return {name: np.full(len(array), len(columns), array.dtype) for name, array in columns.items()}


def put_in_place(columns):
    """Gives nothing back, and puts other arrays where some were, as people write it: a new one, each other's, and one
    that is about to be another's."""
    columns["I1"] = columns["I1"] * 0 + 7
    columns["I2"], columns["I3"] = columns["I3"], columns["I2"]
    columns["C2"], columns["C1"] = columns["C1"], columns["C1"] + 1


def no_such_name(columns):
    return undefined  # noqa: F821


def process(columns):
    """The process that it runs in, in the place of a number."""
    return {"I1": np.full_like(columns["I1"], os.getpid())}


@takes_matrix
def log_in_place(numbers):
    np.log1p(numbers, out=numbers)


@takes_matrix
def log_anew(numbers):
    return np.log1p(numbers)


@takes_matrix
def log_as_float64(numbers):
    return np.log1p(numbers).astype(np.float64)


def log_by_column(columns):
    for name in [f"I{n}" for n in range(1, 14)]:
        np.log1p(columns[name], out=columns[name])


@takes_matrix
def numbered_columns(numbers):
    """Each column gets the number of its place."""
    numbers[:] = np.arange(numbers.shape[1])


@takes_matrix
def log_but_fails(numbers):
    """Fails on some rows, after it wrote into all of them."""
    failing = (numbers[:, 1] > 8).any()
    np.log1p(numbers, out=numbers)
    if failing:
        raise ValueError("too much")


def log_by_column_but_fails(columns):
    failing = (columns["I2"] > 8).any()
    log_by_column(columns)
    if failing:
        raise ValueError("too much")


@takes_matrix
def one_row_less(numbers):
    return numbers[1:]


@takes_matrix
def sums(numbers):
    return numbers.sum(axis=1)


@takes_matrix
def too_large(numbers):
    large = numbers.astype(np.float64)
    large[3, 2] = 1e300
    return large


@takes_matrix
def beyond_cardinality(ids):
    ids[5, 1] = 2**30


def edit_bags(columns):
    """Drops or changes ids of the bags `b`, in one of the ways in which a function may do it."""
    lengths, ids = columns["b.lengths"], columns["b"]
    chance = np.random.default_rng(int(ids.sum()))
    keep = chance.random(len(ids)) < 0.5
    rows = np.repeat(np.arange(len(lengths)), lengths)
    fewer = np.bincount(rows[keep], minlength=len(lengths)).astype(np.int32)
    way = chance.integers(8)
    if way == 0:
        lengths[:], columns["b"] = fewer, ids[keep]
    elif way == 1:
        lengths[:] = fewer
        return {"b": ids[keep]}
    elif way == 2:
        return {"b": ids[keep], "b.lengths": fewer}
    elif way == 3:
        lengths[:], ids[:] = lengths[::-1].copy(), ids[::-1].copy()
    elif way == 4:
        columns["b.lengths"] = lengths[::-1].copy()
    elif way == 5:
        columns["b"] = ids[::-1]
    elif way == 6:
        lengths[:] = 0
        return {"b": ids[:0], "b.lengths": lengths}
    return None


def break_bags(columns):
    """Gives lengths that do not fit their ids, or values that are missing, by $SLUICE_TEST_WAY."""
    lengths, ids = columns["b.lengths"], columns["b"]
    match os.environ["SLUICE_TEST_WAY"]:
        case "fewer lengths in place":
            lengths[:] = 0
        case "negative length in place":
            lengths[0], lengths[1] = -1, lengths[1] + lengths[0] + 1
        case "more lengths":
            return {"b.lengths": lengths + 1}
        case "fewer ids":
            return {"b": ids[1:]}
        case "masked ids":
            return {"b": np.ma.masked_equal(ids, ids[0])}
        case "masked numbers":
            columns["x"] = np.ma.masked_less(columns["x"], 0.5)
    return None
