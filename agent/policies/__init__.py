"""One file per policy, all behind `decide(snapshot, state) -> (knobs, state, reason)`; `make` finds one by its name."""

from __future__ import annotations

from agent.policies.fixed import Fixed
from agent.policies.planner import Planner
from agent.tunable import Policy
from ingest.knobs import KnobError, nearest

POLICIES: dict[str, type[Fixed] | type[Planner]] = {"fixed": Fixed, "planner": Planner, "auto": Planner}


def make(name: str) -> Policy:
    """The policy of that name. `auto` is the planner for now; its `name` says so."""
    if name not in POLICIES:
        raise KnobError(f"no policy {name!r}{nearest(name, POLICIES)}")
    return POLICIES[name]()
