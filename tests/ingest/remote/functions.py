"""Functions that remote workers call in tests."""

import numpy as np


def halved(columns):
    """Writes into one column, gives another anew and leaves the others."""
    columns["I1"] *= 0.5
    return {"C1": np.maximum(columns["C1"] - 1, 0)}


def picky(columns):
    """Fails on some rows."""
    if (columns["I2"] > 8).any():
        raise ValueError("too much")
    return halved(columns)


def put_in_place(columns):
    columns["I1"] = columns["I1"] * 2


def length(columns):
    """The length of each text. Fails on texts with a !."""
    texts = columns["query"].to_pylist()
    if any("!" in text for text in texts):
        raise ValueError("too loud")
    return {"length": [len(text) for text in texts]}


def short(columns):
    return {"I1": columns["I1"][:-1]}


def greedy(columns):
    raise MemoryError("all of it")


def numbered(columns):
    """Gives a column that has no name."""
    return {1: columns["I1"]}
