"""What a search may choose from: a `Space` names flags of the trainer, each with its range."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.dlrm import start_options as options
from sluice.dlrm.options import ConfigError

DEFAULT: dict[str, Any] = {
    "lr": {"low": 0.003, "high": 0.3, "log": True},
    "dense-lr": {"low": 0.0003, "high": 0.01, "log": True},
    "batch-size": [1024, 2048, 4096, 8192],
    "width": [8, 16, 32],
    "dense-layers": ["64", "128,64", "256,128"],
    "over-layers": ["64", "256,128", "512,256"],
    "model": ["dlrm", "dcn"],
    "cross-rank": [64],  # dcn's full matrices take several times as long and bring no more
}


@dataclass(frozen=True, slots=True)
class Space:
    """Flag → a list of values, or {low, high, log}, which means whole numbers if both ends are whole."""

    choices: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ConfigError("search: a space without a setting")
        for name, found in self.choices.items():
            if isinstance(found, list) and found:
                continue
            if not isinstance(found, dict) or not {"low", "high"} <= found.keys() <= {"low", "high", "log"}:
                raise ConfigError(f"search: {name!r}: write a list of values, or {{\"low\": …, \"high\": …}}, with "
                                  "\"log\": true for a range over magnitudes")
            if not found["low"] < found["high"] or (found.get("log") and found["low"] <= 0):
                raise ConfigError(f"search: {name!r}: from {found['low']} to {found['high']} is no range")
        ends = {n: f[-1] if isinstance(f, list) else f["high"] for n, f in self.choices.items()}
        options.parse(["--run-dir", "search", *words(ends)])  # names a flag that the trainer lacks

    @classmethod
    def read(cls, path: Path | None) -> Space:
        """Reads a space from a JSON file; without one, the default."""
        if path is None:
            return cls(DEFAULT)
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"search: {path} cannot be read as JSON ({error})") from None
        if not isinstance(found, dict):
            raise ConfigError(f"search: {path} holds no object of {{setting: choices}}")
        return cls(found)

    def distributions(self) -> dict[str, Any]:
        """The choices as Optuna's distributions."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        found: dict[str, Any] = {}
        for name, choice in self.choices.items():
            if isinstance(choice, list):
                found[name] = CategoricalDistribution(choice)
            else:
                whole = isinstance(choice["low"], int) and isinstance(choice["high"], int)
                found[name] = (IntDistribution if whole else FloatDistribution)(**choice)
        return found


def words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of the trainer's command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]
