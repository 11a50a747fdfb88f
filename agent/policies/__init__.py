"""The policies by their names: one file each, all behind `decide(snapshot, state) -> (knobs, state, reason)`.

The product has five. Published tuners for comparison are in `benchmarks/rivals` of the repository. They are registered
here when one of them is first requested.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from sluice.agent.policies.auto import Auto
from sluice.agent.policies.fixed import Fixed
from sluice.agent.policies.intune import InTune
from sluice.agent.policies.opening.contract import Foreknowledge, LearnedPolicy
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.policies.shadow import Shadow
from sluice.agent.tunable import Policy
from sluice.ingest.knobs import KnobError, nearest

_LEARNED = "sluice.agent.policies.opening.policy"


def auto(known: Foreknowledge | None = None, weights: str = "") -> Policy:
    """Returns the learned policy with the planner after it. Without weights: the planner.

    `known` is what is known of the pipeline before its first row. A file of `weights` replaces those in use."""
    learned: LearnedPolicy | None = None
    if weights or importlib.util.find_spec(_LEARNED) is not None:
        kind = importlib.import_module(_LEARNED).NetworkPolicy
        learned = kind.load(Path(weights)) if weights else kind.in_use()
    return Planner(name="auto") if learned is None else Auto(learned, known=known)


PRODUCT: dict[str, Callable[[], Policy]] = {
    "auto": auto,
    "planner": Planner,
    "shadow": Shadow,
    "fixed": Fixed,
    "intune": InTune,
}
MODES = ("auto", "planner", "shadow", "fixed", "intune")
"""The policies that may tune a training or a loop."""
RIVALS = (
    "autotune",
    "autotune-adaptive",
    "bayes",
    "cachew",
    "cores",
    "ds2",
    "even",
    "hill",
    "offline-grid",
    "plumber",
    "plumber-adaptive",
    "trident",
)
"""The policies of `benchmarks/rivals`, for the error message of a program without them."""
_registered: dict[str, Callable[[], Policy]] = {}


def register(rivals: Mapping[str, Callable[[], Policy]]) -> None:
    """Adds policies for `make`."""
    taken = sorted(PRODUCT.keys() & rivals.keys())
    if taken:
        raise ValueError(
            f"{', '.join(taken)}: the product has policies of these names; choose others"
        )
    _registered.update(rivals)


def names() -> list[str]:
    """Returns the names of all available policies, with the rivals if the repository has them."""
    find_rivals()
    return [*PRODUCT, *sorted(_registered)]


def make(name: str, known: Foreknowledge | None = None, weights: str = "") -> Policy:
    """Returns the policy of that name. `auto` uses `known` and `weights`, or the weights in use."""
    if name in PRODUCT:
        return auto(known, weights) if name == "auto" else PRODUCT[name]()
    if not find_rivals() and name in RIVALS:
        raise KnobError(
            f"the policy {name!r} is not part of the installed package: it is in benchmarks/rivals of "
            f"the repository, as do {', '.join(rival for rival in RIVALS if rival != name)}"
        )
    if name not in _registered:
        raise KnobError(f"no policy {name!r}{nearest(name, names())}")
    return _registered[name]()


def find_rivals() -> bool:
    """Registers the rivals if the repository has them. Returns whether it does."""
    try:
        import sluice.benchmarks.rivals  # noqa: F401  it registers them
    except ModuleNotFoundError as error:
        if error.name not in ("sluice.benchmarks", "sluice.benchmarks.rivals"):
            raise
        return False
    return True
