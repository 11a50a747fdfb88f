"""The files of learned weights: tensors, and a record of how they were taught; and which of an opening's is in use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sluice.common.errors import UsageError
from sluice.ingest.machine import cache_folder

SHIPPED = Path(__file__).with_name("opening.safetensors")
FORM = 1
"""Counts how often the inputs or the answers changed their meaning: weights of another form are not looked for."""
Shapes = Mapping[str, tuple[int, ...]]


class WeightsError(UsageError):
    """A weights file that does not fit: its message says which and why."""


def installed() -> Path:
    """Where `sluice learn` installs weights for this user's runs."""
    return cache_folder() / f"opening-{FORM}.safetensors"


def in_use() -> Path | None:
    """The weights that runs open with: the user's own, or else those that came with the package; None if neither
    are."""
    return next((path for path in (installed(), SHIPPED) if path.exists()), None)


def read(
    path: Path, shapes: Shapes, policy: str = "opening"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of these shapes, and the record. Raises WeightsError for a file that has something else. The
    library of the format is not needed for it: a header in JSON, and the numbers behind it."""
    try:
        whole = path.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:begin])
        record = json.loads(header["__metadata__"]["record"])
        weights = {name: _tensor(whole[begin:], **header[name]) for name in shapes}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{path}: no weights of {policy}: {error}; `sluice teach --policy {policy}` makes them"
        ) from error
    for name, tensor in weights.items():
        if tensor.shape != shapes[name]:
            raise WeightsError(
                f"{path}: {name} is {tensor.shape}, wanted is {shapes[name]}; `sluice teach --policy "
                f"{policy}` makes weights that fit"
            )
    return weights, record


def _tensor(
    numbers: bytes, *, dtype: str, shape: Sequence[int], data_offsets: Sequence[int]
) -> np.ndarray:
    if dtype != "F32":
        raise ValueError(f"numbers of type {dtype}, not F32")
    return np.frombuffer(numbers[slice(*data_offsets)], "<f4").reshape(shape).copy()


def write(path: Path, weights: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all."""
    from safetensors.numpy import save_file

    unfinished = path.with_name(path.name + ".unfinished")
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in weights.items()},
        unfinished,
        {"record": json.dumps(record)},
    )
    unfinished.replace(path)
