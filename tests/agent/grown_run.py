"""Run folders as a long, a short and a troubled run leave them, made by a seed in no time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.product import Run

STAGES = ("decode", "shuffle", "batch", "squash")
FAULTS = (
    ("cores=1@{at:.0f}s", "1 core instead of 4"),
    ("slow-transform=3@{at:.0f}s", "transforms do their work 3 times"),
    ("kill-worker=1@{at:.0f}s", "sent SIGKILL to 4711"),
)


def _knobs(workers: int) -> dict[str, Any]:
    return {
        "workers": {name: workers if name == "squash" else 1 for name in STAGES},
        "backend": {"squash": "process"},
        "fused": ["shuffle"],
        "read_ahead_bytes": 2**26 * workers,
        "prefetch_bytes": 2**25,
    }


def decided(at: float, number: int = 1, **more: Any) -> dict[str, Any]:
    """The decision of that number: one reader more."""
    before, after = ({"workers": {"decode": workers}} for workers in (number, number + 1))
    told = {"before": before, "after": after, "reason": {"text": "more"}}
    return {"at": at, "kind": "decision", "sequence": number, **told, **more}


def effect(
    at: float,
    number: int = 1,
    *,
    rates: tuple[float, float] = (100.0, 200.0),
    stalls: tuple[float, float] = (0.5, 0.1),
    error: float | None = None,
) -> dict[str, Any]:
    """The effect of that decision."""
    return {
        "at": at,
        "kind": "effect",
        "sequence": number,
        **dict(zip(("rows_per_s_before", "rows_per_s_after"), rates, strict=True)),
        **dict(zip(("stall_before", "stall_after"), stalls, strict=True)),
        "prediction_error": error,
    }


def written(path: Path, *lines: dict[str, Any], config: dict[str, Any] | None = None) -> Run:
    """A run folder with these events and metrics."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    for name, is_metric in (("metrics", True), ("events", False)):
        kept = [
            line for line in lines if (line["kind"] in ("loader", "train", "eval")) == is_metric
        ]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return Run.read(path)


def write(
    path: Path, seconds: float, *, looks: int, decisions: int = 0, faults: int = 0, seed: int = 7
) -> Path:
    """A training run of two ranks over that time, whose knobs were changed so often, and to which so much happened."""
    draw, every = random.Random(seed), seconds / looks
    changed = sorted(draw.uniform(0.1, 0.95) * seconds for _ in range(decisions))
    hit = sorted(draw.uniform(0.4, 0.95) * seconds for _ in range(faults))
    metrics: list[dict[str, Any]] = []
    for number in range(looks):
        at = every * (number + 1)
        workers = 1 + sum(change <= at for change in changed) % 7
        slow = 0.4 if any(0 <= at - moment < seconds / 20 for moment in hit) else 1.0
        rate = 5e3 * slow * min(workers, 4) * draw.uniform(0.9, 1.1)
        metrics.append(
            {
                "at": at,
                "kind": "loader",
                "rows": 1000,
                "rows_per_s": rate,
                "stall": max(0.0, 1.0004 - rate / 2e4),
                "demand_rows_per_s": 2.1e4 * draw.uniform(0.95, 1.05),
                "memory_used": 2**30 * draw.uniform(0.5, 0.9),
                "memory_limit": 2**31,
                "cpu": min(4.0, workers * 0.9),
                "cpu_quota": 4.0,
                "knobs": _knobs(workers),
                "stages": {
                    name: {
                        "workers": workers if name == "squash" else 1,
                        "rows_per_s": rate,
                        "cpu": 0.1,
                        "busy": workers * 0.97 if name == "squash" else draw.uniform(0, 0.3),
                    }
                    for name in STAGES
                },
            }
        )
        if number % 3 == 2:
            metrics.append(
                {"at": at, "kind": "train", "loss": 0.4 + 0.3 / (1 + number), "stall": 0.1}
            )
    metrics.append({"at": seconds, "kind": "eval", "split": "validation", "auc": 0.8123})
    events: list[dict[str, Any]] = []
    for number, at in enumerate(changed, 1):
        before, after = 1 + (number - 1) % 7, 1 + number % 7
        reason = {"text": "squash is the bottleneck (1 of 1 worker busy)"}
        turned = {"before": _knobs(before), "after": _knobs(after), "reason": reason}
        events.append(decided(at, number, **turned))
        brought = {"rates": (5e3 * min(before, 4), 5e3 * min(after, 4)), "stalls": (0.7, 0.1)}
        error = 1.7 if number % 2 else -0.2
        events.append(effect(min(at + 5 * every, seconds), number, **brought, error=error))
    for number, at in enumerate(hit):
        name, did = FAULTS[number % len(FAULTS)]
        events.append({"at": at, "kind": "fault", "fault": name.format(at=at), "did": did})
    if decisions:
        events.append(
            {
                "at": seconds,
                "kind": "end",
                "auc": 0.81,
                "samples_per_s": 1.8e4,
                "stall_fraction": 0.12,
            }
        )
    plan = [
        {
            "name": f"C{n}",
            "rows": 10**n,
            "bytes": 132 * 10**n,
            "kind": "table",
            "ranks": [n % 2],
            "why": "whole: on the least loaded rank",
        }
        for n in range(1, 6)
    ]
    written(
        path,
        *metrics,
        *sorted(events, key=lambda line: line["at"]),
        config={
            "kind": "train",
            "ranks": 2,
            "data": "tables/criteo",
            "memory_limit": 2**31,
            "bayes_auc": 0.8201,
            "plan": plan,
            "follow": "",
            "model": {"dense_layers": [128, 64], "width": 32},
        },
    )
    return path
