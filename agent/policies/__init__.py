"""The policies by their names: one file each, all behind `decide(snapshot, state) -> (knobs, state, reason)`.

The product has three: `auto` is the tuner, `shadow` only reports what it would do, and `fixed` changes nothing.

Other published tuners are in `benchmarks/rivals` of the repository, and are imported when one of
them is first requested.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING

from sluice.ingest.knobs import KnobError, nearest

if TYPE_CHECKING:
    from sluice.agent.tunable import Policy


PRODUCT = {
    "auto": "sluice.agent.tuner.tuner:Tuner",
    "shadow": "sluice.agent.policies.shadow:Shadow",
    "fixed": "sluice.agent.policies.fixed:Fixed",
}
"""Each policy that may tune a training or a loop, and its class, which is imported when the policy is made."""
MODES = tuple(PRODUCT)
_AUTO_NOW = ("planner", "next")
"""Names that a policy had in earlier versions. The tuner took its place."""
RIVALS = {
    "autotune": "sluice.benchmarks.rivals.autotune:Autotune",
    "cores": "sluice.benchmarks.rivals.cores:Cores",
    "even": "sluice.benchmarks.rivals.even:Even",
    "intune": "sluice.benchmarks.rivals.intune:InTune",
    "plumber": "sluice.benchmarks.rivals.plumber:Plumber",
}
"""The policies of `benchmarks/rivals`, which a wheel leaves out."""


def names() -> list[str]:
    """Returns the names of all available policies, with the rivals if the repository has them."""
    return [*PRODUCT, *(RIVALS if has_rivals() else ())]


def renamed(name: str) -> str:
    """Returns the present name of a policy. If that is another one, a warning says so."""
    if name not in _AUTO_NOW:
        return name
    warnings.warn(
        f"tuning: {name!r} is part of 'auto' now, which takes its place",
        FutureWarning,
        stacklevel=3,
    )
    return "auto"


def make(name: str) -> Policy:
    """Returns the policy of that name."""
    name = renamed(name)
    if name in RIVALS and not has_rivals():
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
