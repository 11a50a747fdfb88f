"""One file per policy, all behind `decide(snapshot, state) -> (knobs, state, reason)`; `make` finds one by its name."""

from __future__ import annotations

from collections.abc import Callable

from sluice.agent.policies.auto import Auto
from sluice.agent.policies.fixed import Fixed
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.policies.published.autotune import Autotune, AutotuneAdaptive
from sluice.agent.policies.published.bayes import Bayes
from sluice.agent.policies.published.cachew import Cachew
from sluice.agent.policies.published.cores import Cores
from sluice.agent.policies.published.ds2 import DS2
from sluice.agent.policies.published.even import Even
from sluice.agent.policies.published.grid import OfflineGrid
from sluice.agent.policies.published.hill import Hill
from sluice.agent.policies.published.intune import InTune
from sluice.agent.policies.published.plumber import Plumber, PlumberAdaptive
from sluice.agent.policies.published.trident import Trident
from sluice.agent.policies.shadow import Shadow
from sluice.agent.tunable import Policy
from sluice.ingest.knobs import KnobError, nearest

POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": Fixed, "cores": Cores, "even": Even, "autotune": Autotune, "autotune-adaptive": AutotuneAdaptive,
    "plumber": Plumber, "plumber-adaptive": PlumberAdaptive, "ds2": DS2, "cachew": Cachew, "hill": Hill,
    "offline-grid": OfflineGrid, "bayes": Bayes, "trident": Trident, "intune": InTune,
    "planner": Planner, "auto": Auto, "shadow": Shadow,
}


def make(name: str) -> Policy:
    """The policy of that name."""
    if name not in POLICIES:
        raise KnobError(f"no policy {name!r}{nearest(name, POLICIES)}")
    return POLICIES[name]()
