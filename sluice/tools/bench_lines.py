"""What `sluice bench` says about a pipeline between two snapshots: `measurement`, and `advice` at the end of a run."""

from __future__ import annotations

from collections.abc import Container

from sluice.agent.report.format import percent
from sluice.ingest.knobs import Knobs, format_bytes
from sluice.ingest.stats import Snapshot

_NOISE = 0.02  # share of waiting that nobody needs to mend
_NO_STEP = 100.0  # times the rows without waiting, from which on there is no trainer to speak of


def measurement(before: Snapshot, after: Snapshot, fused: Container[str] = ()) -> str:
    """Describes the pipeline and each of its stages in one line."""
    elapsed_s = max(after.at - before.at, 1e-9)
    words = [
        f"{(after.rows - before.rows) / elapsed_s:,.0f} rows/s",
        f"stall {100 * _stall(before, after):.0f} %",
        f"{_cores_used(before, after):.1f} of {after.cpu_quota:.3g} cores",
        format_bytes(after.memory_used),
    ]
    if held_back := after.held_back - before.held_back:
        pressed = after.held_back_pressure - before.held_back_pressure
        words.append(
            f"held back {held_back}× for memory ({held_back - pressed} limit, {pressed} pressure)"
        )
    stages = [
        f"{name} {workers}, {100 * busy:.0f} % busy"
        for name, workers, busy in _busy_shares(before, after, fused)
    ]
    return f"{', '.join(words)} | {'; '.join(stages)}"


def advice(before: Snapshot, after: Snapshot, knobs: Knobs) -> str:
    """Says how much a faster loader would bring at most, and which stage to help."""
    stall = _stall(before, after)
    if stall < _NOISE:
        return f"the trainer waited {percent(stall)} of its time: a faster loader brings nothing"
    busy = dict[str, float]()
    head = ""
    for name, _, share in _busy_shares(before, after, knobs.fused):
        head = head if name in knobs.fused else name
        busy[head] = busy.get(head, 0.0) + share
    slowest = max(busy, key=lambda name: busy[name])
    compute_s = after.consumer_compute_s - before.consumer_compute_s
    gain = (after.at - before.at) / max(compute_s, 1e-9)
    most = f", without that it takes {gain:.2g} times the rows" if gain < _NO_STEP else ""
    used = _cores_used(before, after)
    what = (
        f"try --tuning auto, or --knobs {slowest}={knobs.workers[slowest] + 1}"
        if after.cpu_quota - used >= 1
        else "only more cores or --workers on other hosts help"
    )
    return (
        f"the trainer waited {percent(stall)} of its time{most}; the busiest stage is {slowest} "
        f"({percent(busy[slowest])}), with {used:.1f} of {after.cpu_quota:.3g} cores in use: {what}"
    )


def _busy_shares(
    before: Snapshot, after: Snapshot, fused: Container[str]
) -> list[tuple[str, str, float]]:
    """Returns each stage's name, its workers in words, and the share of their time between the two snapshots that they
    were busy. The workers of a fused stage are those of the stage before, and so is their time."""
    team_s: list[float] = []
    stages = []
    for now in after.stages:
        then = before.stage(now.name)
        # A stage may have been resized in between; what its workers did adds up to their time.
        busy_s = now.busy_s - then.busy_s
        waited_s = now.wait_input_s - then.wait_input_s + now.wait_output_s - then.wait_output_s
        if now.name not in fused:
            team_s.append(1e-9)
        team_s[-1] += busy_s + waited_s
        workers = "fused" if now.name in fused else f"{now.workers}×"
        stages.append((now.name, workers, busy_s, len(team_s) - 1))
    return [(name, workers, busy_s / team_s[team]) for name, workers, busy_s, team in stages]


def _stall(before: Snapshot, after: Snapshot) -> float:
    wait_s = after.consumer_wait_s - before.consumer_wait_s
    compute_s = after.consumer_compute_s - before.consumer_compute_s
    return wait_s / max(wait_s + compute_s, 1e-9)


def _cores_used(before: Snapshot, after: Snapshot) -> float:
    return (after.cpu_used_s - before.cpu_used_s) / max(after.at - before.at, 1e-9)
