"""The figures of a run: `RunOutcome`. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

from sluice.agent.report.changes import FASTER, Change
from sluice.agent.report.format import count, percent, seconds
from sluice.agent.report.incidents import NO_STALL, find_causes, recovery, settled_of
from sluice.agent.report.run_folder import Line, Run

_SMALL_LOSS = 0.1
"""A loss below this share of the run's time is not named."""
_JUST_BEFORE_S = 1.5
_FEWEST_LOOKS = 3
"""A run with fewer looks is too short to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The figures of a run, each None if it was not measured. The page, `explain` and the last lines use them.

    Rates and stalls of the loader are those of one part of a resumed run (`judged_part`). Settled figures are those up
    to the first injected fault."""

    rows_per_s_first: float | None = None
    """The rate just before the first decision. Without a decision: of the whole part. All rates skip the start."""
    rows_per_s_settled: float | None = None
    """The rate in the last third of the loader's time. None if the run is too short."""
    stall_first: float | None = None
    stall_settled: float | None = None
    settled_s: float | None = None
    """Seconds from the first rows until the settled rate was reached for good, or the trainer no longer waited. That is
    not before the first change. None without a change before that."""
    changes_settling: int = 0
    """The decisions in the undisturbed part. `decisions` counts all."""
    changes_faster: int = 0
    """The decisions in the undisturbed part after which measurably more rows came."""
    decisions: int = 0
    peak_memory: int | None = None
    memory_limit: int | None = None
    auc: float | None = None
    bayes_auc: float | None = None
    rows_per_s_last: float | None = None
    """The rate in the last third of the time after the last injected fault and the last change. Without a fault: the
    settled rate. `stall_last` is its stall."""
    stall_last: float | None = None
    rows_per_s_whole: float | None = None
    """The rate of the whole run, or since its last resume, as the consumer counted it. `stall_whole` is its stall."""
    stall_whole: float | None = None
    first_batch_s: float = 0.0
    """How long the trainer waited for the first batch. `stall_whole` usually excludes it."""
    core_s_per_million: float | None = None
    """The processor seconds that the input took for a million rows."""
    evaluation_s: float = 0.0
    huge_row_group: int = 0
    """The rows of the largest row group, if it is huge."""
    looks: int = 0
    """How many times the loader was measured."""
    seconds: float = 0.0
    """The duration, without the summary at the end."""
    ended: bool = False
    faults: tuple[str, ...] = ()
    """The faults of the tuning itself. Injected faults are incidents."""

    @property
    def largest_loss(self) -> tuple[str, float]:
        """The name and the seconds of the run's largest loss: `start`, `evaluation`, or `waiting` by default."""
        trained_s = max(0.0, self.seconds - self.first_batch_s - self.evaluation_s)
        waiting = (self.stall_whole or 0.0) * trained_s
        # If losses are equal, the first one counts.
        losses = {
            "waiting": max(waiting, _SMALL_LOSS * self.seconds),
            "start": self.first_batch_s,
            "evaluation": self.evaluation_s,
        }
        return max(losses.items(), key=lambda loss: loss[1])

    @property
    def headline(self) -> str:
        """A sentence about the whole run and its largest loss. Empty if the whole run has no figures."""
        if self.rows_per_s_whole is None or self.stall_whole is None:
            return ""
        whole = f"{count(self.rows_per_s_whole)} rows/s over the whole run"
        if self.core_s_per_million:
            whole += f", {seconds(self.core_s_per_million)} of a core for a million rows of input"
        name, lost_s = self.largest_loss
        if name == "waiting":
            return f"{whole}, {percent(self.stall_whole)} waiting for input."
        what, cause = "evaluation", ""
        if name == "start":
            what = "the wait for the first batch"
            if self.huge_row_group:
                cause = f", because a row group has {self.huge_row_group:,} rows"
        of_all = f"{seconds(round(lost_s, 1))} of {seconds(round(self.seconds, 1))}"
        return f"{whole}; the largest loss was {what}, {of_all}{cause}."


def outcome(run: Run, part: Run, changes: Sequence[Change]) -> RunOutcome:
    """Returns the figures of a run. `part` is its `judged_part`, with these changes."""
    looks = run.of("loader")
    aucs = [line["auc"] for line in run.of("eval") if line.get("auc") is not None]
    ends = run.of("end")
    # A resumed run with nothing left to train also ends, but has no figures.
    counted: Line = next(
        (e for e in reversed(ends) if e.get("samples_per_s", e.get("rows_per_s"))), {}
    )
    # Looks are those of one rank. The end event has the sums of all ranks, so it counts only if there is one rank.
    of_rank = counted if run.ranks == 1 else {}
    lines = [line for line in (*run.events, *run.metrics) if line.get("kind") != "end"]
    faults = (line for line in run.of("fault") if "fault" not in line)
    return RunOutcome(
        **_rates(part, changes),
        rows_per_s_whole=counted.get("samples_per_s", counted.get("rows_per_s")),
        stall_whole=counted.get("stall_fraction"),
        first_batch_s=counted.get("first_batch_s") or 0.0,
        core_s_per_million=counted.get("core_s_per_million"),
        evaluation_s=sum(line.get("seconds", 0.0) for line in run.of("eval")),
        huge_row_group=run.config.get("huge_row_group", 0),
        looks=len(looks),
        decisions=len(run.of("decision")),
        peak_memory=of_rank.get("peak_bytes")
        or max(filter(None, (look.get("memory_used") for look in looks)), default=None),
        memory_limit=of_rank.get("memory", {}).get("limit")
        or (looks[-1].get("memory_limit") if looks else None),
        auc=aucs[-1] if aucs else None,
        bayes_auc=next(
            (e["bayes_auc"] for e in (*reversed(ends), run.config) if e.get("bayes_auc")), None
        ),
        seconds=max((float(line.get("at", 0.0)) for line in lines), default=0.0),
        ended=bool(ends),
        faults=tuple(str(line.get("text", "a fault without words")) for line in faults),
    )


def judged_part(run: Run) -> Run:
    """Returns the part of a resumed run that its rates are of: the newest one that is long enough to judge."""
    return max(
        reversed(run.parts()), key=lambda part: min(len(_started(part.looks())), _FEWEST_LOOKS)
    )


def _rates(part: Run, changes: Sequence[Change]) -> dict[str, Any]:
    """Returns the fields of `RunOutcome` that come from the rates of the loader."""
    faults = fault_times(part)
    loader = _started(part.looks())
    calm, first_fault = undisturbed(part)
    settling = [change for change in changes if change.at <= first_fault]
    before = calm
    if settling:
        # The first looks include compilers, first files and connections, so only those just before the change count.
        change = settling[0].at
        before = [m for m in part.looks() if m["at"] <= change and m.get("rows_per_s")]
        before = [m for m in before if m["at"] > change - _JUST_BEFORE_S] or before[-1:]
    settled = calm[2 * len(calm) // 3 :] if len(calm) >= _FEWEST_LOOKS else []
    after = [m for m in loader if m["at"] > max(faults, default=0.0)] or loader
    last = settled
    if settled and faults:
        last = after[-settled_of(after, since=changes[-1].at if changes else 0.0) :]
    first_rows = next((m["at"] for m in part.of("loader") if m.get("rows_per_s")), 0.0)
    return {
        "rows_per_s_first": mean(before, "rows_per_s"),
        "rows_per_s_settled": mean(settled, "rows_per_s"),
        "stall_first": mean(before, "stall"),
        "stall_settled": mean(settled, "stall"),
        "settled_s": _settled_s(calm, settled, settling[0].at, first_rows) if settling else None,
        "changes_settling": len(settling),
        "changes_faster": sum(change.result == FASTER for change in settling),
        "rows_per_s_last": mean(last, "rows_per_s"),
        "stall_last": mean(last, "stall"),
    }


def fault_times(run: Run) -> list[float]:
    """Returns the times of the injected faults."""
    return [cause.at for cause in find_causes(run) if cause.is_injected]


def undisturbed(part: Run) -> tuple[Sequence[Line], float]:
    """Returns the looks before the first injected fault, and its time. If they are too few, all looks and infinity."""
    loader = _started(part.looks())
    first_fault = min(fault_times(part), default=inf)
    calm = [m for m in loader if m["at"] <= first_fault]
    return (loader, inf) if len(calm) < _FEWEST_LOOKS else (calm, first_fault)


def _settled_s(
    calm: Sequence[Line], settled: Sequence[Line], change: float, first_rows: float
) -> float | None:
    """Returns `RunOutcome.settled_s`. `change` is the time of the first change, and `settled` are the last of the looks
    `calm`."""
    rate = mean(settled, "rows_per_s")
    if rate is None:
        return None
    # If the trainer does not wait, its own rate may vary.
    reached = [
        (m["at"], rate if m.get("stall", 1.0) <= NO_STALL else m["rows_per_s"])
        for m in calm
        if m["at"] > change
    ]
    _, after_s = recovery(first_rows, reached, len(settled))
    return change - first_rows if after_s == 0 else after_s


def _started(loader: Sequence[Line]) -> Sequence[Line]:
    """Returns the looks at the loader after its first rows, for each start of the run."""
    begin = next((n for n, look in enumerate(loader) if look.get("rows_per_s")), len(loader))
    return [look for look in loader[begin + 1 if begin else 0 :] if look.get("rows", 1)]


def mean(lines: Sequence[Line], name: str) -> float | None:
    """Returns the mean of a field over the lines that have it. None if no line has it."""
    values = [float(line[name]) for line in lines if line.get(name) is not None]
    return fmean(values) if values else None
