"""What a candidate is worth compared with the planner's choice, as learned: `Advantage`. It needs only numpy;
`sluice.agent.learn.advantage_training` fits it.

One small network looks at every stage alike, so that pipelines of any length fit; the mean and the largest of its
outputs go with the numbers of the whole through two more layers. Several such networks, each fitted to another
draw of the samples, agree where they have seen enough: their mean less a multiple of their spread is the lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sluice.agent.policies.learned.candidates import STAGE_INPUTS, WHOLE_INPUTS, Candidate

MEMBERS = 6
NEVER = 1e3  # a margin that nothing exceeds: nothing learned justifies leaving the planner's choice
STAGE_UNITS, UNITS = 16, 32
FORMAT = "1"
WEIGHTS = Path(__file__).with_name("auto.safetensors")
SHAPES = {
    "stage_weight": (MEMBERS, STAGE_INPUTS, STAGE_UNITS), "stage_bias": (MEMBERS, STAGE_UNITS),
    "first_weight": (MEMBERS, 2 * STAGE_UNITS + WHOLE_INPUTS, UNITS), "first_bias": (MEMBERS, UNITS),
    "second_weight": (MEMBERS, UNITS, UNITS), "second_bias": (MEMBERS, UNITS),
    "last_weight": (MEMBERS, UNITS), "last_bias": (MEMBERS,), "caution": (2,),
}


class WeightsError(ValueError):
    """A weights file that does not fit: its message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """Predicts how many more rows than the planner's choice a candidate brings over the next seconds, as a share."""

    weights: Mapping[str, np.ndarray]

    @property
    def never(self) -> bool:
        """Whether training found no bound that pays in pipelines it had not seen; the planner's choice then always
        stands."""
        return bool(self.weights["caution"][1] >= NEVER)

    def of(self, candidate: Candidate) -> np.ndarray:
        """The prediction of each network."""
        w = self.weights
        hidden = np.maximum(candidate.stages @ w["stage_weight"] + w["stage_bias"][:, None], 0)
        whole = np.broadcast_to(candidate.whole, (MEMBERS, WHOLE_INPUTS))
        pooled = np.concatenate([hidden.mean(1), hidden.max(1), whole], axis=1)
        first = np.maximum(np.einsum("mi,mij->mj", pooled, w["first_weight"]) + w["first_bias"], 0)
        second = np.maximum(np.einsum("mi,mij->mj", first, w["second_weight"]) + w["second_bias"], 0)
        return np.asarray(np.einsum("mi,mi->m", second, w["last_weight"]) + w["last_bias"])

    def mean(self, candidate: Candidate) -> float:
        return float(self.of(candidate).mean())

    def lower_bound(self, candidate: Candidate) -> float:
        """The mean less `caution[0]` times the spread, less `caution[1]`."""
        found, (spread, margin) = self.of(candidate), self.weights["caution"]
        return float(found.mean() - spread * found.std() - margin)


def load(path: Path = WEIGHTS) -> Advantage:
    """Loads the weights. Raises WeightsError for a file that is damaged, foreign or newer."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            made_in = (file.metadata() or {}).get("format", "none")
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: no weights can be read: {error}; `make policy` makes them") from error
    if made_in != FORMAT:
        raise WeightsError(f"{path}: weights of format {made_in}, and this version reads {FORMAT}; "
                           f"`make policy` makes them")
    for name, shape in SHAPES.items():
        if name not in found or found[name].shape != shape or not np.isfinite(found[name]).all():
            was = found[name].shape if name in found else "missing"
            raise WeightsError(f"{path}: {name} is {was}, wanted are finite numbers of shape {shape}; "
                               f"`make policy` makes them")
    return Advantage({name: found[name].astype(np.float64) for name in SHAPES})
