"""Writes numbers, knobs and events for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from string import ascii_uppercase
from typing import Any

from sluice.ingest.knobs import Knobs, format_bytes


def count(value: float) -> str:
    """Returns a number with three digits and a unit: `18.5 k`."""
    rounded = float(f"{value:.3g}")
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(rounded) >= size:
            return f"{rounded / size:.3g} {unit}"
    return f"{rounded:.3g}"


def times(ratio: float) -> str:
    """Returns a ratio with two digits: `1.8`, `290`."""
    return f"{float(f'{ratio:.2g}'):,g}"


def percent(value: float) -> str:
    """Returns a share as a percentage: `3.4 %`."""
    return f"{100 * value:.{1 if 0.0005 <= value < 0.0995 else 0}f} %"


def seconds(value: float) -> str:
    """Returns a time: `3.5 s`, `2 min 10 s` or `1 h 5 min`."""
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def counted(number: int, noun: str) -> str:
    """Returns `one change`, or `3 changes`."""
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def measurement(metric: Mapping[str, Any]) -> str:
    """Describes the pipeline and each of its stages at a look of the agent, in one line."""
    held = f", held back {times}× for memory" if (times := metric["held_back"]) else ""
    stages = (
        f"{name} {stage['busy']:.1f} of {stage['workers']} busy"
        for name, stage in metric["stages"].items()
    )
    return (
        f"{metric['rows_per_s']:,.0f} rows/s, stall {percent(metric['stall'])}, {metric['cpu']:.1f} of "
        f"{metric['cpu_quota']:.3g} cores, {format_bytes(metric['memory_used'])}{held} | {'; '.join(stages)}"
    )


def moves(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Returns the difference between two choices of knobs: `decode 1 → 4, prefetch 32 MiB → 64 MiB`.

    Both are JSON objects, as `Knobs.to_dict` returns them."""
    parts = []
    for key, usual in (("workers", "–"), ("backend", "thread")):
        old, new = before.get(key) or {}, after.get(key) or {}
        parts += [
            f"{stage} {old.get(stage, usual)} → {new[stage]}"
            for stage in new
            if new[stage] != old.get(stage, usual)
        ]
    for key, label in (("read_ahead_bytes", "read-ahead"), ("prefetch_bytes", "prefetch")):
        if key in before and key in after and before[key] != after[key]:
            parts.append(f"{label} {format_bytes(before[key])} → {format_bytes(after[key])}")
    return ", ".join(parts) or "nothing"


def moved(choice: Mapping[str, Any]) -> str:
    """Returns the difference that a decision or a proposal makes, as `moves` does."""
    return moves(choice.get("before") or {}, choice.get("after") or {})


def reason_of(choice: Mapping[str, Any]) -> str:
    """Returns the reason for a decision or a proposal."""
    return (choice.get("reason") or {}).get("text") or "no reason given"


def line(event: Mapping[str, Any]) -> str:
    """Returns an event as one line, for a person who watches the run."""
    kind = event.get("kind")
    if kind == "decision":
        return f"decision {event['sequence']}: {event['reason']['text']}; now {Knobs.from_dict(event['after'])}"
    if kind == "proposal":
        return f"would change: {event['reason']['text']}; to {Knobs.from_dict(event['after'])}"
    if kind == "fault" and "fault" in event:
        return f"fault {event['fault']}: {event['did']}"
    if kind == "effect":
        before = event["rows_per_s_before"]
        return (
            f"after decision {event['sequence']} there were {event['rows_per_s_after']:,.0f} rows/s"
            + (f", {before:,.0f} before" if before is not None else "")
        )
    return str(event.get("text", event))


def printer(marked: str, say: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Returns a function that says events and measurements. Events of the kind `marked` get the letters that the
    report has for them."""
    letters = cycle(ascii_uppercase)

    def show(event: dict[str, Any]) -> None:
        text = measurement(event) if event["kind"] == "loader" else line(event)
        say(f"{next(letters)}. {text}" if event["kind"] == marked else text)

    return show
