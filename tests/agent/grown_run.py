"""Run folders whose events and metrics a test gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sluice.agent.report.run_folder import Run


def written(path: Path, *lines: dict[str, Any], config: dict[str, Any] | None = None) -> Run:
    """A run folder with these events and metrics."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    for name, is_metric in (("metrics", True), ("events", False)):
        kept = [one for one in lines if (one["kind"] in ("loader", "train", "eval")) == is_metric]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    return Run.read(path)
