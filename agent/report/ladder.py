"""The report's section on a ladder: what each lever brought on the way from the plainest settings to this run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sluice.agent.report.format import count
from sluice.agent.report.run_folder import Run
from sluice.ingest.knobs import format_bytes

_BAR = 120  # width of the longest bar


def section(run: Run) -> str:
    """The section for the run's last event `ladder`; empty without one."""
    events = run.of("ladder")
    if not events:
        return ""
    steps: Sequence[Mapping[str, Any]] = events[-1]["steps"]
    most = max((s["samples_per_s"] for s in steps if s.get("samples_per_s")), default=1.0)
    rows = "".join(_row(step, most) for step in steps)
    head = "".join(f"<th>{name}</th>" for name in ("lever", "step", "samples a second", "", "AUC", "tables", "state",
                                                   "sent a step", ""))
    note = escape("One lever a step. A step that is kept stays for those below it; each of the others is tried alone.")
    return (f'<section><h2>Ladder</h2><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>'
            f"</table></div><p>{note}</p></section>")


def _row(step: Mapping[str, Any], most: float) -> str:
    rate = step.get("samples_per_s")
    bar = ""
    if rate:
        bar = f'<div style="width:{_BAR * rate / most:.0f}px;height:10px;background:var(--c0)"></div>'
    cells = [escape(str(step["lever"])), escape(str(step["step"])), count(rate) if rate else "", bar,
             f"{step['auc']:.4f}" if step.get("auc") else "",
             *(format_bytes(step[name]) if step.get(name) is not None else ""
               for name in ("table_bytes", "state_bytes", "bytes_per_step")), escape(str(step.get("verdict", "")))]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
