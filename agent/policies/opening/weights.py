"""The file of an opening's weights: tensors, and a record of how they were taught."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]


class OpeningWeightsError(ValueError):
    """A weights file that does not fit: its message says which and why."""


def read(path: Path, shapes: Shapes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of these shapes, and the record. Raises OpeningWeightsError for a file that has something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            weights = {name: file.get_tensor(name) for name in shapes}
            record = json.loads((file.metadata() or {})["record"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise OpeningWeightsError(f"{path}: no weights of an opening: {error}; `sluice teach --policy opening` makes "
                                  "them") from error
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise OpeningWeightsError(f"{path}: {name} is {tensor.shape}, wanted is {shapes[name]}; `sluice teach "
                                      "--policy opening` makes weights that fit")
    return weights, record


def write(path: Path, weights: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all."""
    from safetensors.numpy import save_file

    unfinished = path.with_name(path.name + ".unfinished")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}, unfinished,
              {"record": json.dumps(record)})
    unfinished.replace(path)
