"""What the examples of this folder measure with: made clicks, and ways of loading them that take turns."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

NUMBERS = tuple(f"I{n}" for n in range(13))
CATEGORIES = tuple(f"C{n}" for n in range(26))
VALUES = 10_000
"""How many ids a category has."""


def made_clicks(rows: int) -> dict[str, npt.NDArray[Any]]:
    """Columns of the shape of Criteo's, and a click that depends on a number and on a category."""
    random = np.random.default_rng(0)
    numbers = {name: random.normal(size=rows).astype(np.float32) for name in NUMBERS}
    ids = {name: (random.zipf(1.3, rows) % VALUES).astype(np.int32) for name in CATEGORIES}
    chance = 1 / (1 + np.exp(3 - numbers["I0"] - ids["C0"] % 5))
    return {**numbers, **ids, "click": (random.random(rows) < chance).astype(np.float32)}


def in_turns(
    ways: Mapping[str, Callable[[], int]], rounds: int, ours: str = "sluice"
) -> dict[str, Any]:
    """Runs each way once a round and says of each how many rows a second it brought, and how much processor time a row
    took, of this process and of all that it started. Each way returns its rows.

    Of the fastest of the others it says how many times as fast ours was: the median over the rounds, so that a moment
    in which the machine was busy counts for both."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            began, used = time.perf_counter(), _processor_seconds()
            rows = way()
            rates[name].append(rows / (time.perf_counter() - began))
            costs[name].append((_processor_seconds() - used) / rows * 1e6)
            print(
                f"round {number + 1}, {name}: {rates[name][-1]:,.0f} rows/s, {costs[name][-1]:.2f} µs of processor "
                "time a row",
                file=sys.stderr,
                flush=True,
            )
    best = max(
        (name for name in ways if name != ours), key=lambda name: statistics.median(rates[name])
    )
    return {
        "rows_per_s": {name: round(statistics.median(found)) for name, found in rates.items()},
        "cpu_us_per_row": {
            name: round(statistics.median(found), 3) for name, found in costs.items()
        },
        "beside": best,
        "ratio": _ratio(rates[ours], rates[best]),
        "cpu_ratio": _ratio(costs[best], costs[ours]),
    }


def _processor_seconds() -> float:
    """Of this process and all that it started, with those that run on beside it, as Ray's do."""
    living = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            living += sum(child.cpu_times()[:4])
    return living + sum(os.times()[:4])


def _ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 2)
