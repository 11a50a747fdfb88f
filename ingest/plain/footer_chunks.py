"""Parses the column chunks of row groups from the bytes of a Parquet footer: `chunk_numbers`, `check_chunks`.

The bytes are in Thrift's compact protocol. Arrow's own function (Arrow 26) ends the whole process if sizes in a
damaged footer contradict each other, so this module parses the bytes itself, by compiled code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.common.native import call_kernel

_PHYSICAL = (
    "BOOLEAN",
    "INT32",
    "INT64",
    "INT96",
    "FLOAT",
    "DOUBLE",
    "BYTE_ARRAY",
    "FIXED_LEN_BYTE_ARRAY",
)
"""The physical types by their numbers in parquet.thrift."""
_CHUNK = 4 << 6 | 1  # the path of a column chunk: fields of a footer and of a row group
_FILE_PATH, _ABOUT = _CHUNK << 6 | 1, _CHUNK << 6 | 3
_TYPE, ENCODINGS, CODEC, VALUE_COUNT, _PLAIN, STORED, _DATA, _DICTIONARY = 1, 2, 4, 5, 6, 7, 9, 11
"""The fields of the metadata of a column chunk."""
_NULLS_THERE = _ABOUT << 12 | 12 << 6 | 3  # in the statistics
_SIZES = _ABOUT << 6 | 16
_TEXTS, _REPETITIONS, _DEFINITIONS = 1, 2, 3  # the fields of these sizes
NULLS, START, _TEXT_BYTES, _OCCURRENCES = 0, 59, 60, 60
"""What `chunk_numbers` has besides the fields. The last one is added to a field of the sizes."""
_DIFFERENCES = 1 << 7  # the encoding DELTA_BYTE_ARRAY
_DELTAS = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
"""The encodings of texts that Arrow (26) does not decode as a dictionary."""


_LARGE_BYTES = 2**20
_ONE_LARGE = threading.Lock()
"""Footers with more stored bytes than that are parsed one after the other, because each takes a multiple of them."""
_PARSED_BYTE = 18  # bytes in memory for each stored byte of a footer: two copies, and a pair of numbers for two bytes


class ThriftError(ValueError):
    """A footer cannot be parsed, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A column's values in one row group, as stored in the file."""

    values: int
    stored: int
    """The bytes in the file."""
    plain: int
    """The bytes without compression."""
    start: int
    """The position of its first page."""
    dictionary: int
    """The bytes of its dictionary page in the file, or 0 without one."""
    has_differences: bool
    """Whether texts are stored as differences from the text before."""
    texts: int
    """The bytes of its texts, each as often as it comes, as newer writers say in the footer. Otherwise 0."""


def group_rows(metadata: Any) -> tuple[int, ...]:
    """Returns the number of rows of each row group."""
    return tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))


def chunks_of_group(metadata: Any, group: int) -> list[StoredChunk]:
    """Returns the chunk of each leaf column, in the order of the schema."""
    numbers = chunk_numbers(metadata)[:, group]
    fields = numbers[[VALUE_COUNT, STORED, _PLAIN, START, _DATA, ENCODINGS, _TEXT_BYTES]].T.tolist()
    return [
        StoredChunk(values, stored, plain, start, data - start, bool(known & _DIFFERENCES), texts)
        for values, stored, plain, start, data, known, texts in fields
    ]


def delta_texts(
    metadata: Any, names: Collection[str], groups: Sequence[int] | None = None
) -> set[str]:
    """Returns those of these columns of texts that Arrow cannot decode as dictionaries in one of these row groups, or
    in one of all."""
    schema = metadata.schema
    leaves = [
        n for n in range(metadata.num_columns if names else 0) if schema.column(n).path in names
    ]
    return {
        schema.column(leaf).path
        for leaf in leaves
        for group in (range(metadata.num_row_groups) if groups is None else groups)
        if not _DELTAS.isdisjoint(metadata.row_group(group).column(leaf).encodings)
    }


def group_of_longest_texts(metadata: Any) -> int:
    """Returns the row group whose texts take the most bytes when they are decoded, as newer writers say in a footer."""
    return int(chunk_numbers(metadata)[_TEXT_BYTES].sum(axis=1).argmax())


def most_row_bytes(metadata: Any, least: int) -> float:
    """Returns the stored bytes of a row in the row group where they are most. One of fewer than `least` rows counts as
    if it had so many."""
    rows = np.maximum(group_rows(metadata), least)
    return float((chunk_numbers(metadata)[STORED].sum(axis=1) / rows).max(initial=0.0))


def check_chunks(metadata: Any) -> None:
    """Raises ThriftError if a column chunk of a footer contradicts the schema, as Arrow demands it.

    Call it before `metadata.row_group(…).column(…)`. Arrow (26) ends the whole process at such a chunk."""
    numbers = chunk_numbers(metadata)
    for number in range(metadata.num_columns):
        leaf, chunks = metadata.schema.column(number), numbers[:, :, number]
        wrong = chunks[_TYPE] != _PHYSICAL.index(leaf.physical_type)
        wrong |= (chunks[_OCCURRENCES + _TEXTS] > 0) & (leaf.physical_type != "BYTE_ARRAY")
        for sizes, most in (
            (_REPETITIONS, leaf.max_repetition_level),
            (_DEFINITIONS, leaf.max_definition_level),
        ):
            wrong |= ~np.isin(chunks[_OCCURRENCES + sizes], (0, most + 1))
        if wrong.any():
            raise ThriftError(
                f"column {leaf.path!r} of row group {wrong.argmax()} contradicts the schema"
            )


def check_file(path: str, metadata: Any, error: Callable[[str], Exception]) -> None:
    """Raises an `error` with the file's path if `check_chunks` raises a ThriftError."""
    try:
        check_chunks(metadata)
    except ThriftError as wrong:
        raise error(f"{path}: {wrong}; the file is damaged, so make it again") from wrong


def chunk_numbers(metadata: Any) -> npt.NDArray[np.int64]:
    """Returns the numbers in a footer that describe column chunks, by field, row group and leaf. Missing ones are 0.

    ENCODINGS has a bit for each encoding. NULLS is the number of missing values, or -1. START is the position of the
    first page. STORED is 0 if the values are in another file. Raises ThriftError."""
    with _ONE_LARGE if metadata.serialized_size > _LARGE_BYTES else nullcontext():
        return _chunk_numbers(metadata)


def parsing_bytes(metadata: Any) -> int:
    """Returns an upper bound of the memory that parsing a large footer takes for a moment. 0 for a small one."""
    stored, chunks = metadata.serialized_size, metadata.num_row_groups * metadata.num_columns
    return _PARSED_BYTE * stored + 2 * 64 * 8 * chunks if stored > _LARGE_BYTES else 0


def _chunk_numbers(metadata: Any) -> npt.NDArray[np.int64]:
    out = pa.BufferOutputStream()
    metadata.write_metadata_file(out)
    raw = np.frombuffer(out.getvalue(), np.uint8)
    end = len(raw) - 8
    begin = end - int(raw[-8:-4].view(np.uint32)[0])
    count, _ = thrift_numbers(raw, begin, end, None)
    numbers = np.empty((max(count, 0), 2), np.int64)
    thrift_numbers(raw, begin, end, numbers)
    paths, values = numbers.T
    groups, leaves = metadata.num_row_groups, metadata.num_columns
    starts = np.flatnonzero(paths == _CHUNK)
    of_groups = np.searchsorted(starts, np.flatnonzero(paths == _CHUNK >> 6))
    if len(starts) != groups * leaves or (of_groups != np.arange(groups) * leaves).any():
        raise ThriftError("the footer cannot be parsed")
    fields = np.zeros((64, groups * leaves), np.int64)
    chunk = np.cumsum(paths == _CHUNK, dtype=np.int32) - 1
    inside = paths >> 6 == _ABOUT
    fields[paths[inside] & 63, chunk[inside]] = values[inside]
    fields[ENCODINGS] = 0
    encodings = paths == _ABOUT << 6 | ENCODINGS
    bits = np.left_shift(1, np.clip(values[encodings], 0, 62))
    np.bitwise_or.at(fields[ENCODINGS], chunk[encodings], bits)
    fields[NULLS] = -1
    for row, path in ((NULLS, _NULLS_THERE), (_TEXT_BYTES, _SIZES << 6 | _TEXTS)):
        fields[row, chunk[paths == path]] = values[paths == path]
    for field in (_TEXTS, _REPETITIONS, _DEFINITIONS):
        there = chunk[paths == _SIZES << 6 | field]
        fields[_OCCURRENCES + field] = np.bincount(there, minlength=groups * leaves)
    data, before = fields[_DATA], fields[_DICTIONARY]
    fields[START] = np.where((before > 0) & (before < data), before, data)
    fields[STORED, chunk[paths == _FILE_PATH]] = 0
    return fields.reshape(64, groups, leaves)


def thrift_numbers(
    raw: Any, begin: int, end: int, numbers: npt.NDArray[np.int64] | None
) -> tuple[int, int]:
    """Parses one struct of Thrift's compact protocol, in the bytes of `raw` from `begin` to `end`. Writes a pair for
    each number in it: the path of its field, with 6 bits a level, and its value. A text counts as its length, a struct
    as 0, and a bool as 0 or 1.

    Returns how many pairs there are, and where the struct ends. A count below 0: the bytes are no such struct, or
    `numbers` has too little room. Without `numbers`, they are only counted."""
    stop = np.zeros(1, np.int64)
    most = 0 if numbers is None else len(numbers)
    count = call_kernel("thrift_numbers", raw, begin, end, numbers, most, stop)
    return count, int(stop[0])
