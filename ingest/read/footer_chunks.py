"""What a Parquet footer says about the column chunks of a row group: `chunks_of_group`, read from its bytes.

The bytes are Thrift's compact protocol. Arrow's own call for this ends the whole process if sizes in a damaged footer
do not fit each other (its exception crosses a border that none may cross; Arrow 26), so it is not called.
"""

from __future__ import annotations

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
_VALUES = 5
_PLAIN = 6
_STORED = 7
_DATA_PAGE = 9
_DICTIONARY_PAGE = 11


class ThriftError(ValueError):
    """Bytes that are no footer."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A column's values in one row group, as they are stored in the file."""

    values: int
    stored: int
    """The bytes in the file."""
    plain: int
    """The bytes without compression."""
    start: int
    """The position where its first page begins."""
    dictionary: int
    """The bytes of its dictionary page in the file; 0 if there is none."""


def chunks_of_group(file: bytes, group: int) -> list[StoredChunk]:
    """Reads the chunk of each leaf column, in the order of the schema. `file` ends as a Parquet file does: with a
    footer, its length and `PAR1`. ThriftError, if it cannot be read."""
    begin = len(file) - 2 * _MAGIC - int.from_bytes(file[-2 * _MAGIC : -_MAGIC], "little")
    if begin < 0:
        raise ThriftError("a footer longer than the file")
    try:
        reader = _Reader(file, begin)
        for number, kind in reader.fields():
            if number == _ROW_GROUPS:
                for at, (_, element) in enumerate(reader.elements()):
                    value = reader.value(element, 0)
                    if at == group:
                        return [_chunk(column[_META_DATA]) for column in value[_COLUMNS]]
            else:
                reader.value(kind, 0)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ThriftError(
            f"the footer ends or breaks off within row group {group} ({type(error).__name__})"
        ) from error
    raise ThriftError(f"there is no row group {group}")


def footer_bytes(metadata: Any) -> bytes:
    """Writes a footer that was read as it is stored after the data of a Parquet file."""
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
    )


class _Reader:
    def __init__(self, data: bytes, at: int):
        self._data, self._at = data, at

    def fields(self) -> Any:
        """Yields (number, type) of each field of a struct; its value is to be read before the next one."""
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._number()
            yield number, kind

    def elements(self) -> Any:
        """Yields (place, type) of each element of a list."""
        head = self._byte()
        size = head >> 4 if head >> 4 != 15 else self._varint()
        for at in range(size):
            yield at, head & 15

    def value(self, kind: int, depth: int) -> Any:
        """Reads a value: structs as dicts by the numbers of their fields. Whatever is not a number, and holds none, is
        skipped."""
        if depth > _DEPTH:
            raise ThriftError("structs within structs without end")
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
