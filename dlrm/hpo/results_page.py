"""The page on which a search shows what it found."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from sluice.agent.report import page as report
from sluice.dlrm.hpo.space import words


def write(folder: Path, found: Any) -> Path:
    """Writes the page and says where it is."""
    from sluice.dlrm.hpo.study import front, picture

    best = front(found)
    rows = "".join(f"<tr><td>{one.number}</td><td>{one.auc:.5f}</td><td>{one.seconds:.1f} s</td><td>"
                   f"{escape(' '.join(words(one.settings)))}</td></tr>" for one in best)
    table = f"<table><tr><th>trial</th><th>AUC</th><th>time</th><th>settings</th></tr>{rows}</table>"
    aside = sum(one.state == "aside" for one in found)
    page = folder / "search.html"
    page.write_text(report.filled(
        title="Search", name=folder.resolve().name,
        verdict=f"{len(found)} trials, AUC up to {best[-1].auc:.5f}" if best else f"{len(found)} trials",
        rest=f"{aside} were set aside early.", charts=picture(found), decisions=table,
        footer=f"{sum(one.seconds for one in found):.0f} seconds of trials."), encoding="utf-8")
    return page
