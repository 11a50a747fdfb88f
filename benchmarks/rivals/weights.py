"""Reads and writes files of learned weights: tensors, and a record of their training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sluice.agent.whole_file import replace_file
from sluice.common.errors import UsageError

Shapes = Mapping[str, tuple[int, ...]]


class WeightsError(UsageError):
    """An invalid weights file. The message names the file and the reason."""


def read(path: Path, shapes: Shapes, made_by: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors of these shapes, and the record. Raises WeightsError for any other content.

    It does not need the safetensors library: the file is a JSON header followed by the numbers."""
    try:
        whole = path.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:begin])
        record = json.loads(header["__metadata__"]["record"])
        weights = {}
        for name in shapes:
            if header[name]["dtype"] != "F32":
                raise ValueError(f"numbers of type {header[name]['dtype']}, not F32")
            numbers = whole[begin:][slice(*header[name]["data_offsets"])]
            weights[name] = np.frombuffer(numbers, "<f4").reshape(header[name]["shape"]).copy()
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path}: not a weights file of this policy: {error}; `{made_by}` makes one"
        ) from error
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise WeightsError(
                f"{path}: {name} has shape {tensor.shape}, not {shapes[name]}; `{made_by}` makes weights that "
                "fit"
            )
    return weights, record


def digest(*tensors: np.ndarray) -> str:
    """Returns a short hash of these weights."""
    return hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors)).hexdigest()[:12]


def write(path: Path, weights: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
    """Writes the file completely or not at all."""
    from safetensors.numpy import save

    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}
    replace_file(path, save(tensors, {"record": json.dumps(record)}))
