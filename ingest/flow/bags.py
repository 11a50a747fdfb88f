"""Bags of ids, which have several ids a row: `stored_bags` says where a row group has them, `copy_bags` copies them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.common.native import call_kernel
from sluice.etl.spec.nested_columns import is_bytes
from sluice.ingest.flow.number_types import ValueRefused, arrow_array, numbers

_ID_BYTES = 4  # bytes of an id


class StoredBags(NamedTuple):
    """The bags of some rows as a row group has them."""

    begins: npt.NDArray[Any]
    """Where the ids of each row begin, as offsets from `ids`."""
    ends: npt.NDArray[Any]
    unit: int
    """The bytes that one unit of an offset stands for."""
    ids: npt.NDArray[Any]
    """Owns the ids. Ids beyond int32 are stored as the same 32 bits."""
    nbytes: int
    """The bytes of the ids of these rows."""


def stored_bags(column: pa.ChunkedArray, kind: Any) -> StoredBags:
    """Returns the bags of a column. A missing bag has no ids. Ids that already have the type `kind` are not copied.
    Raises ValueRefused, with the row if one bag is wrong."""
    array = column.chunk(0) if column.num_chunks == 1 else _joined(column)
    if pa.types.is_list_view(array.type):
        begins, ids = array.offsets.to_numpy(), array.values.to_numpy()
        return StoredBags(begins, begins + array.sizes.to_numpy(), _ID_BYTES, ids, ids.nbytes)
    unit = 1 if is_bytes(array.type) else _ID_BYTES
    offsets, ids = _packed(array) if unit == 1 else _listed(array, kind)
    nbytes = unit * int(offsets[-1] - offsets[0])
    return StoredBags(offsets[:-1], offsets[1:], unit, ids, nbytes)


def as_lists(lengths: Any, low: Any, high: Any, kind: Any) -> pa.LargeListArray:
    """Returns bags as lists of ids of the type `kind`, in new memory. They are where `copy_bags` takes them from."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = np.empty(offsets[-1], np.int32)
    copy_bags(lengths, low, high, ids)
    return pa.LargeListArray.from_arrays(arrow_array(offsets), arrow_array(ids.view(kind)))


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """Returns a column of several chunks as one. There are several if 32-bit offsets cannot count all bytes."""
    return (column.cast(pa.large_binary()) if is_bytes(column.type) else column).combine_chunks()


def _packed(array: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the offsets of bags that are bytes, and their bytes."""
    _, buffer, data = array.buffers()
    if not len(array):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    kind = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    offsets = np.frombuffer(buffer, kind)[array.offset : array.offset + len(array) + 1]
    sizes = np.diff(offsets)
    if (odd := sizes % _ID_BYTES > 0).any():
        row = int(odd.argmax())
        raise ValueRefused(
            row, f"a bag of {sizes[row]} bytes, which is not a multiple of the four bytes of an id"
        )
    return offsets, np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def _listed(array: pa.Array, kind: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the offsets of bags that are lists, and their ids."""
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise ValueRefused(None, f"a bag of {array.type}")
    if array.null_count:
        array = array.fill_null([])
    if array.values.null_count:
        raise ValueRefused(None, f"{array.values.null_count} empty values within bags")
    offsets, ids = array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False)
    ids, offsets = ids[offsets[0] : offsets[-1]], offsets - offsets[0]
    try:
        return offsets, numbers(ids, kind)
    except ValueRefused as refused:
        row = int(np.searchsorted(offsets, refused.at or 0, "right")) - 1
        raise ValueRefused(row, str(refused)) from None


def copy_bags(lengths: Any, low: Any, high: Any, into: Any) -> None:
    """Copies bags to `into`, one after the other. Each has `lengths` ids at an address that is given in two halves."""
    call_kernel("copy_bags", lengths, low, high, len(lengths), into)
