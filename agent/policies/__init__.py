"""The policies by their names: one file each, all behind `decide(snapshot, state) -> (knobs, state, reason)`.

The product has four. Published tuners for comparison are in `benchmarks/rivals` of the repository. They are registered
here when one of them is first requested.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.ingest.knobs import KnobError, nearest

if TYPE_CHECKING:
    from sluice.agent.choice.observation import Foreknowledge
    from sluice.agent.tunable import Policy


PRODUCT = {
    "auto": "",
    "planner": "planner.planner:Planner",
    "shadow": "shadow:Shadow",
    "fixed": "fixed:Fixed",
}
"""Each policy that may tune a training or a loop, and its class, which is imported when the policy is made."""
MODES = tuple(PRODUCT)
CEILING = "intune-ceiling"
"""A rival that only the simulator has, because it knows the true costs."""
RIVALS = (
    "autotune",
    "cores",
    "even",
    "intune",
    "plumber",
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
    return [*PRODUCT, *sorted({*(RIVALS if has_rivals() else ()), *_registered})]


def make(name: str, known: Foreknowledge | None = None, weights: str = "") -> Policy:
    """Returns the policy of that name. `auto` chooses by its network: by the file `weights`, or by the weights in use.
    Without weights it is the planner. `known` is what is known before the first row."""
    if name == "auto":
        from sluice.agent.choice.choice import Chooser
        from sluice.agent.choice.value import ValueNetwork
        from sluice.agent.policies.planner.planner import Planner

        values = ValueNetwork.load(Path(weights)) if weights else ValueNetwork.in_use()
        return Planner(name="auto") if values is None else Chooser(values, known=known)
    if name in PRODUCT:
        module, _, kind = PRODUCT[name].partition(":")
        made: Policy = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
        return made
    if not find_rivals() and name in (*RIVALS, CEILING):
        raise KnobError(
            f"the policy {name!r} is not part of the installed package: it is in benchmarks/rivals of "
            f"the repository, as do {', '.join(rival for rival in RIVALS if rival != name)}"
        )
    if name not in _registered:
        raise KnobError(f"no policy {name!r}{nearest(name, names())}")
    return _registered[name]()


def find_rivals() -> bool:
    """Registers the rivals if the repository has them. Returns whether it does."""
    if not has_rivals():
        return False
    import sluice.benchmarks.rivals  # noqa: F401  it registers them

    return True


def has_rivals() -> bool:
    """Whether the repository has the rivals. Imports none of them."""
    try:
        return importlib.util.find_spec("sluice.benchmarks.rivals") is not None
    except ModuleNotFoundError:
        return False
