"""Parses the column chunks of row groups from the bytes of a Parquet footer: `chunks_of_group`, `check_chunks`.

The bytes are in Thrift's compact protocol. Arrow's own function (Arrow 26) ends the whole process if sizes in a
damaged footer contradict each other, so this module parses the bytes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_TRUE = 1
_FALSE = 2
_BYTE = 3
_DOUBLE = 7
_BINARY = 8
_LIST = 9
_SET = 10
_MAP = 11
_STRUCT = 12
_NUMBERS = (4, 5, 6)
_DEPTH = 32
_MAGIC = 4  # bytes of `PAR1`, at the beginning and the end
# The numbers of fields in parquet.thrift.
_ROW_GROUPS = 4
_COLUMNS = 1
_META_DATA = 3
_TYPE = 1
_ENCODINGS = 2
_DIFFERENCES = 7  # the encoding DELTA_BYTE_ARRAY
_VALUES = 5
_PLAIN = 6
_STORED = 7
_DATA_PAGE = 9
_DICTIONARY_PAGE = 11
_SIZES = 16
_TEXT_BYTES = 1
_REPETITIONS = 2
_DEFINITIONS = 3
_PHYSICAL = dict(
    enumerate(
        (
            "BOOLEAN",
            "INT32",
            "INT64",
            "INT96",
            "FLOAT",
            "DOUBLE",
            "BYTE_ARRAY",
            "FIXED_LEN_BYTE_ARRAY",
        )
    )
)
"""The physical types by their numbers in parquet.thrift."""


class ThriftError(ValueError):
    """The bytes are not a valid footer."""


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
    has_differences: bool = False
    """Whether texts are stored as differences from the text before. Arrow does not decode these as a dictionary."""


def chunks_of_group(file: bytes, group: int) -> list[StoredChunk]:
    """Returns the chunk of each leaf column, in the order of the schema. `file` must end like a Parquet file: a footer,
    its length, and `PAR1`. Raises ThriftError if the footer cannot be parsed."""
    with _as_thrift_error():
        for at, columns in enumerate(_column_metadata(file)):
            if at == group:
                return [_chunk(column) for column in columns]
    raise ThriftError(f"there is no row group {group}")


def group_of_longest_texts(file: bytes) -> int:
    """Returns the row group whose texts take the most bytes when they are decoded, as newer writers say in a footer."""
    with _as_thrift_error():
        sizes = [
            sum(column.get(_SIZES, {}).get(_TEXT_BYTES, 0) for column in columns)
            for columns in _column_metadata(file)
        ]
    return sizes.index(max(sizes))


def check_chunks(metadata: Any) -> None:
    """Raises ThriftError if a column chunk of a footer contradicts the schema.

    Call it before `metadata.row_group(…).column(…)`. Arrow (26) ends the whole process at such a chunk."""
    leaves = [metadata.schema.column(leaf) for leaf in range(metadata.num_columns)]
    with _as_thrift_error():
        for group, columns in enumerate(_column_metadata(footer_bytes(metadata))):
            for number, leaf in enumerate(leaves):
                if not _fits(columns[number], leaf):
                    raise ThriftError(
                        f"column {leaf.path!r} of row group {group} contradicts the schema"
                    )


def check_file(path: str, metadata: Any, error: Callable[[str], Exception]) -> None:
    """Raises an `error` with the file's path if `check_chunks` raises a ThriftError."""
    try:
        check_chunks(metadata)
    except ThriftError as wrong:
        raise error(f"{path}: {wrong}; the file is damaged, so make it again") from wrong


def _fits(column: dict[int, Any], leaf: Any) -> bool:
    """Returns whether the metadata of a chunk fits its column of the schema, as Arrow demands it."""
    sizes = column.get(_SIZES, {})
    levels = {_REPETITIONS: leaf.max_repetition_level, _DEFINITIONS: leaf.max_definition_level}
    return (
        _PHYSICAL.get(column[_TYPE]) == leaf.physical_type
        and (_TEXT_BYTES not in sizes or leaf.physical_type == "BYTE_ARRAY")
        and all(len(sizes.get(name, ())) in (0, most + 1) for name, most in levels.items())
    )


def _column_metadata(file: bytes) -> Iterator[list[dict[int, Any]]]:
    """Yields the metadata of the column chunks of each row group."""
    begin = len(file) - 2 * _MAGIC - int.from_bytes(file[-2 * _MAGIC : -_MAGIC], "little")
    if begin < 0:
        raise ThriftError("a footer longer than the file")
    reader = _Reader(file, begin)
    for number, kind in reader.fields():
        if number != _ROW_GROUPS:
            reader.value(kind, 0)
            continue
        for _, element in reader.elements():
            value = reader.value(element, 0)
            yield [column[_META_DATA] for column in value[_COLUMNS]]


@contextmanager
def _as_thrift_error() -> Iterator[None]:
    """Returns a context that raises ThriftError where the parsed values lack something."""
    try:
        yield
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ThriftError(f"the footer lacks values ({type(error).__name__})") from error


def footer_bytes(metadata: Any) -> bytes:
    """Returns the bytes of a footer as a Parquet file stores them."""
    out = pa.BufferOutputStream()
    metadata.write_metadata_file(out)
    return bytes(out.getvalue())


def _chunk(column: dict[int, Any]) -> StoredChunk:
    data, dictionary = int(column[_DATA_PAGE]), int(column.get(_DICTIONARY_PAGE, 0))
    between = dictionary and 0 < dictionary < data
    return StoredChunk(
        values=int(column[_VALUES]),
        stored=int(column[_STORED]),
        plain=int(column[_PLAIN]),
        start=dictionary if between else data,
        dictionary=data - dictionary if between else 0,
        has_differences=_DIFFERENCES in column.get(_ENCODINGS, ()),
    )


class _Reader:
    def __init__(self, data: bytes, at: int):
        self._data, self._at = data, at

    def fields(self) -> Any:
        """Yields (number, type) of each field of a struct. The caller reads its value before the next field."""
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._number()
            yield number, kind

    def elements(self) -> Any:
        """Yields (index, type) of each element of a list."""
        head = self._byte()
        size = head >> 4 if head >> 4 != 15 else self._varint()
        for at in range(size):
            yield at, head & 15

    def value(self, kind: int, depth: int) -> Any:
        """Reads a value. A struct becomes a dict by field number. Binary, float and map values are skipped."""
        if depth > _DEPTH:
            raise ThriftError(f"structs are nested more than {_DEPTH} deep")
        if kind == _STRUCT:
            found = {}
            for number, of in self.fields():
                found[number] = of == _TRUE if of in (_TRUE, _FALSE) else self.value(of, depth + 1)
            return found
        if kind in (_LIST, _SET):
            return [self.value(of, depth + 1) for _, of in self.elements()]
        if kind in _NUMBERS:
            return self._number()
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind in (_DOUBLE, _BINARY):
            return self._pass(8 if kind == _DOUBLE else self._varint())
        if kind == _MAP and (size := self._varint()):
            kinds = self._byte()
            for _ in range(size):
                self.value(kinds >> 4, depth + 1)
                self.value(kinds & 15, depth + 1)
            return None
        if kind == _MAP:
            return None
        raise ThriftError(f"a value of type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _pass(self, count: int) -> None:
        self._at += count

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ThriftError("a number without end")

    def _number(self) -> int:
        """Reads a signed number."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
