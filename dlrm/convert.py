"""Writes a run's older checkpoints anew: tensors as safetensors, their layout as JSON. It is needed once.

    sluice convert RUN

Older programs left the layout as a pickle. Nothing else here opens one; this does, by a list of the few names that may
be in it, and refuses any other. Where a checkpoint has checksums, they are compared first. The last line of standard
output is one JSON object: which checkpoints were written anew, and which were as they should be.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251  see `_Listed`: only a few names, none of which does anything, are found
import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.dlrm.checkpoint.meta import (
    LAYOUT,
    PICKLED,
    CheckpointError,
    CheckpointMeta,
    damage,
    pickled,
    read_any,
    refuse,
    whole,
)
from sluice.etl.common.program import run, say
from sluice.etl.common.settings import parse, setting

_SIGNS = "torch.distributed.checkpoint.metadata"
_NAMES = {_SIGNS: ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "StorageMeta",
                   "ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
          "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
          "torch": ("Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
                    "bool"),
          "torch.serialization": ("_get_layout",)}
"""These are plain records, types of numbers, and a function that looks up one of four layouts."""


class _Listed(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("pathlib", "PosixPath"):
            return PurePosixPath  # the folder that it was written to; nothing uses it
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no layout needs")
        from importlib import import_module

        return getattr(import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Whose checkpoints are written anew."""

    run: Path = setting(help="run folder of dlrm.train", metavar="RUN", positional=True)


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(ConvertOptions, argv=argv, prog="sluice convert", description=__doc__)
    folder = args.run / "checkpoints"
    found = [folder / one.name for one in whole(folder)]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint")
    converted, left = [], []
    for path in found:
        meta = read_any(path)
        if pickled(path, meta):
            convert(path, meta, CheckpointDisk())
            say(f"{path} is written anew")
            converted.append(path.name)
        else:
            left.append(path.name)
    return {"converted": converted, "left": left}


def convert(path: Path, meta: CheckpointMeta, files: CheckpointDisk) -> None:
    """Converts one checkpoint, in its own folder: the old files are removed once meta.json names the new ones."""
    from sluice.dlrm.checkpoint.layout import Index, write

    refuse(path, damage(path))
    try:
        with open(path / PICKLED, "rb") as file:
            layout = _Listed(file).load()
        written: list[dict[str, Any]] = []
        values: dict[str, Any] = {}
        names = sorted({str(info.relative_path) for info in layout.storage_data.values()})
        for number, name in enumerate(names):
            entries, others = _of_file(path / name, name, layout)
            written.append(write(files, path, f"rank-{number:05d}.safetensors", entries))
            values |= others
        text = Index.joined(written, values).to_json().encode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, ImportError, IndexError, RuntimeError,
            pickle.UnpicklingError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be converted: {type(error).__name__}: {error}") from None
    files.write(path / LAYOUT, [text])
    files.settle(path)
    sums = {one["file"]: one["sum"] for one in written} | {LAYOUT: zlib.crc32(text)}
    replace(meta, sums=sums).put(path, files)
    for name in (PICKLED, *names):
        files.remove(path / name)


def _of_file(path: Path, name: str, layout: Any) -> tuple[list[Any], dict[str, Any]]:
    """The pieces of tensors in one of the old files, each read when its turn comes, and the other values."""
    from sluice.dlrm.checkpoint.layout import TensorEntry

    if Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a file in the checkpoint's own folder")
    entries, values = [], {}
    for index, info in layout.storage_data.items():
        if info.relative_path != name:
            continue
        load = partial(_loaded, path, info.offset, info.length)
        about = layout.state_dict_metadata[index.fqn]
        chunks = getattr(about, "chunks", None)
        if chunks is None:
            values[index.fqn] = load()
            continue
        size = next(c.sizes for c in chunks if index.offset is None or c.offsets == index.offset)
        first = index.offset if index.offset is not None else (0,) * len(size)
        entries.append(TensorEntry(index.fqn, about.properties.dtype, tuple(about.size), tuple(first), tuple(size),
                                   load))
    return entries, values


def _loaded(path: Path, offset: int, length: int) -> Any:
    """Reads a tensor with torch's own reader, which has a list of permitted names like ours."""
    import torch

    with open(path, "rb") as file:
        file.seek(offset)
        return torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
