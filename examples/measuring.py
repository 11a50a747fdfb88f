"""Synthetic clicks, and a measurement of several ways to load them in turns, for the examples in this folder."""

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
"""The number of ids of a category."""


def make_clicks(rows: int) -> dict[str, npt.NDArray[Any]]:
    """Returns columns like Criteo's, and a click that depends on a number and on a category."""
    random = np.random.default_rng(0)
    numbers = {name: random.normal(size=rows).astype(np.float32) for name in NUMBERS}
    ids = {name: (random.zipf(1.3, rows) % VALUES).astype(np.int32) for name in CATEGORIES}
    chance = 1 / (1 + np.exp(3 - numbers["I0"] - ids["C0"] % 5))
    return {**numbers, **ids, "click": (random.random(rows) < chance).astype(np.float32)}


def measure_in_turns(
    ways: Mapping[str, Callable[[], int]], rounds: int, ours: str = "sluice"
) -> dict[str, Any]:
    """Runs each way once in each round. Returns for each way the rows per second and the processor time of a row, in
    this process and its children. A way returns the number of its rows.

    `ratio` is how many times as fast our way was as the fastest other one (`beside`). It is the median over the rounds,
    because a busy moment of the machine slows all ways of a round."""
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
        "rows_per_s": {
            name: round(statistics.median(measured)) for name, measured in rates.items()
        },
        "cpu_us_per_row": {
            name: round(statistics.median(measured), 3) for name, measured in costs.items()
        },
        "beside": best,
        "ratio": _ratio(rates[ours], rates[best]),
        "cpu_ratio": _ratio(costs[best], costs[ours]),
    }


def _processor_seconds() -> float:
    """Returns the processor seconds of this process and its children. Those that still run, such as Ray's, are
    included."""
    running = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            running += sum(child.cpu_times()[:4])
    return running + sum(os.times()[:4])


def _ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 2)
