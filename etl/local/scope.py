"""What the local engine leaves to Spark: `only_spark` says it by name."""

from __future__ import annotations

from sluice.etl.spec.spec import Spec


def only_spark(spec: Spec) -> str | None:
    """Why only Spark can do a job of this spec; None if the local engine can, too."""
    rows = spec.rows
    found = [*(["[dedup]"] if rows.dedup else []), *(["[[join]]"] if rows.joins else []),
             *(["[[history]]"] if any(not h.lag for h in rows.histories) else []),
             *(["[[lag]]"] if any(h.lag for h in rows.histories) else [])]
    if found:
        return f"{' and '.join(found)} of {spec.name}: rows meet other rows there, which only Spark brings together"
    if spec.input.multiline:
        return f"input.multiline of {spec.name}: records over several lines are read by Spark alone"
    return None
