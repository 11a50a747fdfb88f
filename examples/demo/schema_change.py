"""`make demo-schema`: adds columns to a table while two ranks train on it, once with the agent and once without.

    python -m examples.demo.schema_change --out demo-schema-out [--rows 400000] [--seconds 12]

The first version of the table has the counts I1 to I6. During a training with --follow, a job adds I7 to I13 and a
transform that looks them up at a slow service. The loader applies their operators. The agent tunes the first run all
the time. The second run keeps the knobs that the first one had at the change. One page shows both runs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import psutil

from examples.demo.steps import ROOT, StepFailed, begin, step, torchrun, under_way
from sluice.agent.report import charts, tables
from sluice.agent.report.changes import Change, find_changes
from sluice.agent.report.charts import Panel, Points, Series
from sluice.agent.report.format import count, percent, seconds
from sluice.agent.report.incidents import Incident, find_incidents
from sluice.agent.report.page import filled
from sluice.agent.report.run_folder import Run
from sluice.common.lines import say
from sluice.common.program import run
from sluice.common.settings import parse, setting
from sluice.ingest.knobs import Knobs

AGENT, FROZEN = "the agent goes on", "frozen at the change"
ONE_WORKER = "decode=1,read_ahead_bytes=1MiB,prefetch_bytes=1MiB"
"""One worker a stage, and buffers of one second, so that a page of one minute shows the effects at once."""
SERVICE = "examples.demo.squash"
_NEW = [f"I{number}" for number in range(7, 14)]
_LOOKUP = f"""
[[transform]]
name = "levels"
function = "{SERVICE}:quick_levels"
inputs = {_NEW}
outputs = {_NEW}
"""
_LEAD_S = 8.0
"""Time before the change that the page shows of each run."""
_LOOK_S, _LONGEST_S = 0.25, 300.0
_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class SchemaDemoOptions:
    """The size of the demo, and its folder."""

    out: Path = setting(
        Path("demo-schema-out"),
        "folder for data, tables and runs; the demo empties a folder that it made before",
        metavar="DIR",
    )
    rows: int = setting(400_000, "raw log lines to make", least=1)
    seconds: float = setting(12.0, "how long each run goes on after the change", above=0)
    ranks: int = setting(2, "training ranks", least=1)
    seed: int = setting(1, "seed of data and training")


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(
        SchemaDemoOptions, argv, "python -m examples.demo.schema_change", description=__doc__
    )
    out, began = args.out.resolve(), time.monotonic()
    begin(out)
    whole = (ROOT / "features/criteo_raw.toml").read_text()
    (out / "first.toml").write_text(whole.replace('match = "I*"', 'match = "I[1-6]"'))
    (out / "second.toml").write_text(whole + _LOOKUP)
    step(
        "1/4 raw logs in Criteo's shape",
        *f"sluice synth --rows {args.rows} --seed {args.seed} --out".split(),
        out / "raw",
    )
    step("2/4 the table's first version", *_job(out, "first", out / "table-agent"))
    shutil.copytree(out / "table-agent", out / "table-frozen")
    tuned = _follow(
        "3/4 training, tuned all the time", args, "agent", f"--tuning auto --knobs {ONE_WORKER}"
    )
    knobs = Knobs.from_dict(_at_change(tuned)["knobs"]).text
    frozen = _follow(
        "4/4 the same with the knobs that it had at the change",
        args,
        "frozen",
        f"--tuning fixed --knobs {knobs}",
    )
    both = Comparison(tuned, frozen)
    (out / "report.html").write_text(both.page(), encoding="utf-8")
    minutes = (time.monotonic() - began) / 60
    say(f"""
── done in {minutes:.1f} minutes

  {both.headline}
  {both.rows_told}
  {AGENT}: {both.incidents[AGENT].sentence}
  {FROZEN}: {both.incidents[FROZEN].sentence}

  Open {out / "report.html"}""")
    return {**both.figures(), "minutes": round(minutes, 2), "report": str(out / "report.html")}


def _job(out: Path, spec: str, table: Path, *more: str) -> list[str | Path]:
    return [
        *["sluice", "etl", "--engine", "local", "--spec"],
        out / f"{spec}.toml",
        "--input",
        out / "raw",
        "--output",
        table,
        *more,
    ]


def _follow(title: str, args: SchemaDemoOptions, name: str, tuning: str) -> Run:
    """Trains on a table while a job adds columns to it, and continues for a while after they came."""
    out = args.out.resolve()
    folder, table = out / f"run-{name}", out / f"table-{name}"
    with under_way(
        title,
        *torchrun(1, args.ranks),
        *(
            f"-m dlrm.train --follow --allow-code {SERVICE} --epochs 1000 --seed {args.seed} --batch-size {_BATCH} "
            f"--width 8 --dense-layers 32 --over-layers 32 --lr 0.01 {tuning}"
        ).split(),
        "--data",
        table,
        "--run-dir",
        folder,
    ) as training:
        _wait(
            training,
            folder,
            "the first rows",
            lambda so_far: any(look["rows_per_s"] for look in so_far.looks()),
        )
        step(
            "    meanwhile a job adds columns to the table",
            *_job(out, "second", table, "--mode", "overwrite", "--reuse-state"),
        )
        _wait(training, folder, "the new columns", lambda so_far: bool(so_far.of("follow")))
        _wait(
            training,
            folder,
            "rows with the new columns",
            lambda so_far: bool(_points(so_far, "rows_per_s", since=so_far.of("follow")[0]["at"])),
        )
        _wait(training, folder, "", _passed(args.seconds))
    return Run.read(folder)


def _passed(duration_s: float) -> Callable[[Run], bool]:
    until = time.monotonic() + duration_s
    return lambda _: time.monotonic() >= until


def _wait(training: psutil.Popen, folder: Path, what: str, there: Callable[[Run], bool]) -> None:
    """Waits until `there` holds of the run's folder."""
    until = time.monotonic() + _LONGEST_S
    while not ((folder / "config.json").exists() and there(Run.read(folder))):
        if training.poll() is not None:
            raise StepFailed(
                f"the training ended with {training.returncode} before {what or 'its time'}"
            )
        if time.monotonic() > until:
            raise StepFailed(f"{what} did not come within {_LONGEST_S:g} s")
        time.sleep(_LOOK_S)


class Comparison:
    """Compares two runs that both took up a new version of their table."""

    def __init__(self, tuned: Run, frozen: Run) -> None:
        self._runs = {AGENT: tuned, FROZEN: frozen}
        self._came = {name: float(run.of("follow")[0]["at"]) for name, run in self._runs.items()}
        self._lead = min(_LEAD_S, *self._came.values())
        self.incidents = {
            name: next(i for i in find_incidents(run) if i.what == "schema")
            for name, run in self._runs.items()
        }
        self.headline = _headline(self.incidents)
        self._compared_s = min(
            _last_step_at(run) - self._came[name] for name, run in self._runs.items()
        )
        self._rows: dict[str, float | None] = dict.fromkeys(self._runs)
        self.rows_told = ""
        if self._compared_s > 0:
            tuned_rows, frozen_rows = (
                _rows_between(run, self._came[name], self._came[name] + self._compared_s)
                for name, run in self._runs.items()
            )
            self._rows = {AGENT: tuned_rows, FROZEN: frozen_rows}
            self.rows_told = (
                f"Rows in the first {seconds(self._compared_s)} after the new columns came: "
                f"{count(frozen_rows)} → {count(tuned_rows)}."
            )

    def figures(self) -> dict[str, Any]:
        return {
            key: {
                "rows": self._rows[name],
                "rows_per_s": incident.after,
                "waiting": incident.waited and incident.waited[-1],
                "settled_s": incident.recovered_s,
            }
            for key, (name, incident) in zip(
                ("with_agent", "without"), self.incidents.items(), strict=True
            )
        }

    def page(self) -> str:
        story = find_changes(self._runs[AGENT])
        rows = [
            [
                escape(name),
                tables.verdict(incident.verdict),
                escape(incident.sentence),
            ]
            for name, incident in self.incidents.items()
        ]
        table = tables.table(
            ("run", "result", "effect"),
            rows,
            kind="story",
            row="incident",
            classes=("m", "v"),
        )
        return filled(
            title="New columns while it trains",
            name="demo-schema",
            headline=self.headline,
            rest=(
                f"{self.rows_told} Two trainings of the same table. A job adds columns and a slow lookup. The loader "
                "applies their operators. Both trainings take up the new version at the end of an epoch. "
                "One run keeps its agent, the other run keeps the knobs of that moment."
            ),
            charts=self._charts(story),
            incidents=f"<section><h2>What happened</h2>{table}</section>",
            decisions=tables.decisions(story),
            footer=f"{sum(len(run.metrics) for run in self._runs.values())} measurements.",
        )

    def _charts(self, story: Sequence[Change]) -> str:
        rates, waits = self._points("rows_per_s"), self._points("stall")
        end = max(rate.points[-1][0] for rate in rates if rate.points)
        change = {
            "from": self._lead,
            "to": self._lead,
            "label": "A",
            "what": "new columns",
            "tone": "",
            "text": self.incidents[AGENT].text,
        }
        decisions = [
            {"at": at, "label": str(effect.number), "text": f"{effect.number}. {effect.moves}"}
            for effect in story
            if 0 <= (at := self._time(AGENT, effect.at)) <= end
        ]
        return charts.embedded(
            {"bands": [change], "decisions": decisions}, "moments"
        ) + charts.chart(
            "Before and after the new columns",
            Panel(name="rows a second", axis=charts.ROWS, series=rates),
            Panel(name="time that the trainer waits for input", axis=charts.SHARE, series=waits),
            kind="hero",
            note=f"of all {self._runs[AGENT].ranks} ranks; the columns came after {seconds(self._lead)}",
        )

    def _points(self, field: str) -> list[Series]:
        return [
            Series(
                name=name,
                points=[
                    (self._time(name, at), value)
                    for at, value in _points(run, field, since=self._came[name] - self._lead)
                ],
            )
            for name, run in self._runs.items()
        ]

    def _time(self, name: str, at: float) -> float:
        return at - self._came[name] + self._lead


def _headline(incidents: Mapping[str, Incident]) -> str:
    agent, frozen = incidents[AGENT], incidents[FROZEN]
    if not (agent.after and frozen.after and agent.waited and frozen.waited):
        return "Too little was measured after the new columns came. Let both runs go on for longer (--seconds)."
    return (
        f"{agent.after / frozen.after:.2g} times the rows with the agent after new columns came "
        f"({count(frozen.after)} → {count(agent.after)} rows/s), waiting for input "
        f"{percent(frozen.waited[-1])} → {percent(agent.waited[-1])}."
    )


def _trained(run: Run) -> Points:
    """Returns (time, steps) for each moment at which the trainer's steps were recorded."""
    lines = [*run.of("train"), *run.of("epoch")]
    return sorted((float(line["at"]), float(line["step"])) for line in lines)


def _last_step_at(run: Run) -> float:
    """Returns the time of the last recorded step. Before the first one, it is the start of the run."""
    trained = _trained(run)
    return trained[-1][0] if trained else 0.0


def _rows_between(run: Run, since: float, until: float) -> float:
    """Returns the rows that all ranks trained on between two times."""
    import numpy as np

    times, steps = zip(*_trained(run), strict=True)
    first, last = np.interp([since, until], times, steps)
    return float(round((last - first) * _BATCH))


def _at_change(tuned: Run) -> Mapping[str, Any]:
    """Returns the last measurement before the new version came."""
    return [look for look in tuned.of("loader") if look["at"] <= tuned.of("follow")[0]["at"]][-1]


def _points(run: Run, field: str, *, since: float) -> Points:
    return [(float(look["at"]), float(look[field])) for look in run.looks() if look["at"] >= since]


if __name__ == "__main__":
    run(main)
