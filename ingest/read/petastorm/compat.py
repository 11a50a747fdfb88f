"""Makes Petastorm 0.12.1 and 0.13.1 run on today's Arrow and numpy, as far as Sluice uses it: `install`.

Petastorm opens no dataset, so it lists no folder and unpickles no `common_metadata`. Nothing in site-packages is
edited.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_REMOVED = {
    "filesystem": ("LocalFileSystem", "S3FSWrapper", "FileSystem"),
    "hdfs": ("HadoopFileSystem", "connect"),
}
_lock = threading.Lock()


def named(schema: pa.Schema) -> pa.Schema:
    """Replaces types that Petastorm does not know by similar ones. Values are still read in the file's own types."""
    return pa.schema([f.with_type(_named(f.type)) for f in schema])


def _named(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_named(kind.value_type))
    if pa.types.is_unsigned_integer(kind) and kind != pa.uint8():
        return pa.int32() if kind == pa.uint16() else pa.int64()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


class _Numpy(types.ModuleType):
    """Today's numpy with the two type names that Petastorm uses and numpy has removed."""

    unicode_, string_ = np.str_, np.bytes_

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def install() -> None:
    """Makes `petastorm.reader` importable and gives it the replacements. A second call changes nothing."""
    with _lock:
        # It never calls the names of the removed modules that it imports, so they are empty classes.
        for name, attributes in _REMOVED.items():
            if f"pyarrow.{name}" not in sys.modules:
                module = types.ModuleType(f"pyarrow.{name}")
                for attribute in attributes:
                    setattr(module, attribute, type(attribute, (), {}))
                sys.modules[f"pyarrow.{name}"] = module
                setattr(pa, name, module)
        import petastorm.arrow_reader_worker
        import petastorm.reader
        import petastorm.unischema

        worker = petastorm.arrow_reader_worker
        worker.ParquetFile = lambda opened: None if opened is None else pq.ParquetFile(opened)
        worker.np = petastorm.unischema.np = _Numpy("numpy")


class PetastormLocalFiles:
    """Has the part of the removed LocalFileSystem that Petastorm's converter uses."""

    exists = staticmethod(os.path.exists)


def install_local_files() -> None:
    """Restores the removed local file system for Petastorm's converter."""
    pa.LocalFileSystem, pa.localfs = PetastormLocalFiles, PetastormLocalFiles()
