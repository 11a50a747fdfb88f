"""The policies by their names: one file each, all behind `decide(snapshot, state) -> (knobs, state, reason)`.

The product has five. Tuners that others have published, to be compared with, are optional: they lie in
`benchmarks/rivals` of the repository, and are added here when one of them is first asked for.
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

_OPENER = "sluice.agent.policies.opening.policy"


def auto(known: Foreknowledge | None = None, weights: str = "") -> Policy:
    """The learned opening with the planner behind it; the planner alone where there are no weights of an opening.
    `known` is what is known of the pipeline before its first row; a file of `weights` replaces those in use."""
    opener: LearnedPolicy | None = None
    if weights or importlib.util.find_spec(_OPENER) is not None:
        kind = importlib.import_module(_OPENER).NetworkPolicy
        opener = kind.load(Path(weights)) if weights else kind.in_use()
    return Planner(name="auto") if opener is None else Auto(opener, known=known)


PRODUCT: dict[str, Callable[[], Policy]] = {
    "auto": auto,
    "planner": Planner,
    "shadow": Shadow,
    "fixed": Fixed,
    "intune": InTune,
}
MODES = ("auto", "planner", "shadow", "fixed", "intune")
"""Those that training, and anyone's loop, may be tuned by."""
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
"""What `benchmarks/rivals` registers: so a program without it can say what is missing."""
_registered: dict[str, Callable[[], Policy]] = {}


def register(rivals: Mapping[str, Callable[[], Policy]]) -> None:
    """Adds policies to those that `make` finds."""
    taken = sorted(PRODUCT.keys() & rivals.keys())
    if taken:
        raise ValueError(
            f"{', '.join(taken)}: the product has policies of these names; choose others"
        )
    _registered.update(rivals)


def names() -> list[str]:
    """The names of all policies that can be made here: the rivals' among them where the repository has them."""
    find_rivals()
    return [*PRODUCT, *sorted(_registered)]


def make(name: str, known: Foreknowledge | None = None, weights: str = "") -> Policy:
    """The policy of that name, for a pipeline of which so much is known before its first row; `auto` opens by
    `weights`, or by those in use."""
    if name in PRODUCT:
        return auto(known, weights) if name == "auto" else PRODUCT[name]()
    if not find_rivals() and name in RIVALS:
        raise KnobError(
            f"the policy {name!r} is not part of the installed package: it lies in benchmarks/rivals of "
            f"the repository, as do {', '.join(rival for rival in RIVALS if rival != name)}"
        )
    if name not in _registered:
        raise KnobError(f"no policy {name!r}{nearest(name, names())}")
    return _registered[name]()


def find_rivals() -> bool:
    """Registers the rivals where the repository has them; returns whether it does."""
    try:
        import sluice.benchmarks.rivals  # noqa: F401  it registers them
    except ModuleNotFoundError as error:
        if error.name not in ("sluice.benchmarks", "sluice.benchmarks.rivals"):
            raise
        return False
    return True
