"""The policies by their names: one file each, all behind `decide(snapshot, state) -> (knobs, state, reason)`.

The product has five. `next` is to replace `auto` and `planner` once it is judged.

Other published tuners are in `benchmarks/rivals` of the repository, and are imported when one of
them is first requested.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.ingest.knobs import KnobError, nearest

if TYPE_CHECKING:
    from sluice.agent.choice.observation import Foreknowledge
    from sluice.agent.tunable import Policy


PRODUCT = {
    "auto": "",
    "next": "sluice.agent.tuner.tuner:Tuner",
    "planner": "sluice.agent.policies.planner.planner:Planner",
    "shadow": "sluice.agent.policies.shadow:Shadow",
    "fixed": "sluice.agent.policies.fixed:Fixed",
}
"""Each policy that may tune a training or a loop, and its class, which is imported when the policy is made."""
MODES = tuple(PRODUCT)
RIVALS = {
    "autotune": "sluice.benchmarks.rivals.autotune:Autotune",
    "cores": "sluice.benchmarks.rivals.cores:Cores",
    "even": "sluice.benchmarks.rivals.even:Even",
    "intune": "sluice.benchmarks.rivals.intune:InTune",
    "plumber": "sluice.benchmarks.rivals.plumber:Plumber",
}
"""The policies of `benchmarks/rivals`, which a wheel leaves out."""
CEILING = "intune-ceiling"
"""A rival that only the simulator has, because it knows the true costs."""


def names() -> list[str]:
    """Returns the names of all available policies, with the rivals if the repository has them."""
    return [*PRODUCT, *(RIVALS if has_rivals() else ())]


def make(name: str, known: Foreknowledge | None = None, weights: str = "") -> Policy:
    """Returns the policy of that name. `auto` chooses by its network: by the file `weights`, or by the weights in use.
    Without weights it is the planner. `known` is what is known before the first row."""
    if name == "auto":
        from sluice.agent.choice.choice import Chooser
        from sluice.agent.choice.value import ValueNetwork
        from sluice.agent.policies.planner.planner import Planner

        values = ValueNetwork.load(Path(weights)) if weights else ValueNetwork.in_use()
        return Planner(name="auto") if values is None else Chooser(values, known=known)
    if name in (*RIVALS, CEILING) and not has_rivals():
        raise KnobError(
            f"the policy {name!r} is not part of the installed package: it is in benchmarks/rivals of "
            f"the repository, as are {', '.join(rival for rival in RIVALS if rival != name)}"
        )
    places = {**PRODUCT, **RIVALS}
    if name not in places:
        raise KnobError(f"no policy {name!r}{nearest(name, names())}")
    module, _, kind = places[name].partition(":")
    made: Policy = getattr(importlib.import_module(module), kind)()
    return made


def has_rivals() -> bool:
    """Whether the repository has the rivals. Imports none of them."""
    try:
        return importlib.util.find_spec("sluice.benchmarks.rivals") is not None
    except ModuleNotFoundError:
        return False
