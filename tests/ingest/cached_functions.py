"""Functions over rows for the tests of the cache, and what they depend on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FACTOR = 3
SEEN: dict[str, int] = {}


def lengths(rows: dict[str, Any]) -> dict[str, Any]:
    """A number, a list and a text of each text. It notes its calls in a file that the environment names."""
    texts = rows["text"]
    if path := os.environ.get("CALLS_OF_LENGTHS"):
        with Path(path).open("a") as file:
            file.write(f"{len(texts)}\n")
    sizes = pc.utf8_length(texts)
    return {
        "size": np.asarray(sizes, np.float32) * FACTOR,
        "parts": pa.array([[n, n + 1] for n in sizes.to_pylist()], pa.list_(pa.int64())),
    }


def number(rows: dict[str, Any]) -> dict[str, Any]:
    """The number at the end of each text."""
    return {"x": [float(text.strip("ab")) for text in rows["text"].to_pylist()]}


def failing(rows: dict[str, Any]) -> dict[str, Any]:
    """Fails on some rows."""
    if any(text.endswith("7") for text in rows["text"].to_pylist()):
        raise ValueError("a seven")
    return lengths(rows)


def of_all_rows(rows: dict[str, Any]) -> dict[str, Any]:
    """What it gives depends on the other rows of a call."""
    sizes = np.asarray(pc.utf8_length(rows["text"]), np.float32)
    return {"size": sizes - sizes.mean(), "parts": pa.array([[1]] * len(sizes))}


def with_global(rows: dict[str, Any]) -> dict[str, Any]:
    return {"size": np.full(len(rows["text"]), len(SEEN), np.float32), "parts": [[1]] * len(rows)}


class Tokens:
    """An object that can be called, with a state that its source does not tell."""

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return lengths(rows)


TOKENS = Tokens()


def with_object(rows: dict[str, Any]) -> dict[str, Any]:
    return TOKENS(rows)


def from_file(rows: dict[str, Any]) -> dict[str, Any]:
    """Reads a file whose name the environment has."""
    number = float(Path(os.environ["NUMBER_FILE"]).read_text())
    made = lengths(rows)
    return {**made, "size": made["size"] + np.float32(number)}


def mixed(columns: dict[str, Any]) -> dict[str, Any]:
    """Changes a number, and adds a number and an id. It takes so long that keeping what it gives pays."""
    time.sleep(20e-6 * len(columns["I1"]))
    ids = (columns["C1"] * 7 + columns["I1"].astype(np.int32)) % 50
    other = columns["I2" if "I2" in columns else "number"]
    return {"I1": columns["I1"] / 3, "sum": columns["I1"] + other, "pair": ids}


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {"I2": columns["I2"] * 2}


def third(columns: dict[str, Any]) -> dict[str, Any]:
    return {"I2": columns["I1"] / 3}


def with_mean(columns: dict[str, Any]) -> dict[str, Any]:
    """What it gives depends on the other rows of a call."""
    return {"I1": columns["I1"] - columns["I1"].mean()}
