"""Functions that the tests' specs name as transforms. Each takes a batch's columns as arrays by name."""

import os
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def ratio(columns: Arrays) -> Arrays:
    """A changed number, a new number, an id of two others, and a bag of a row's ids."""
    c1, c5 = columns["C1"], columns["C5"]
    both = np.stack([c1 % 7, c5 % 7], axis=1).reshape(-1).astype(np.int32)
    return {
        "I1": columns["I1"] * 2,
        "ratio": columns["I1"] / (1 + columns["number"]),
        "pair": ((c1 * 31 + c5) % 50).astype(np.int32),
        "both": both,
        "both.lengths": np.full(len(c1), 2, np.int32),
    }


def doubled(columns: Arrays) -> None:
    """Writes into what it got."""
    columns["I1"][:] = columns["I1"] * 2


def fewer_rows(columns: Arrays) -> Arrays:
    return {"x": columns["I1"][1:]}


def other_type(columns: Arrays) -> Arrays:
    return {"x": columns["I1"].astype(np.float64)}


def beyond(columns: Arrays) -> Arrays:
    return {"x": np.where(np.arange(len(columns["I1"])) == 3, 9, 1).astype(np.int32)}


def nothing(_columns: Arrays) -> None:
    pass


def unasked(columns: Arrays) -> Arrays:
    return {"x": columns["C1"], "C1": columns["C1"] + 1}


def writes_where_it_may_not(columns: Arrays) -> Arrays:
    columns["C1"][:] = 0
    return {"x": columns["C1"]}


def fails_on_some(columns: Arrays) -> Arrays:
    if ((columns["number"] > 4) & (columns["number"] < 4.1)).any():
        raise ValueError("a row that it cannot take")
    return {"x": np.full(len(columns["number"]), 5, np.int32)}


def cores_here(columns: Arrays) -> Arrays:
    """Tells on how many cores this thread may run."""
    return {"cores": np.full(len(columns["x"]), len(os.sched_getaffinity(0)), np.float32)}
