"""Structs of Thrift's compact protocol, such as footers of Parquet files, as lists that a test can change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STRUCT, _TEXT, _DOUBLE, _BYTE, _LISTS = 12, 8, 7, 3, (9, 10)
Fields = dict[int, list[Any]]
"""By a field's number: its type, and its value. A list is [type of an element, elements]."""


def varint(number: int) -> bytes:
    """Returns a number in groups of seven bits, the lowest first."""
    content = bytearray()
    while number > 127:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content, number])


def parsed(content: bytes) -> Fields:
    """Returns the fields of a struct."""
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return content[at - count : at]

    def number() -> int:
        value = shift = 0
        while True:
            byte = take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def value_of(kind: int) -> Any:
        if kind == _STRUCT:
            return struct()
        if kind in _LISTS:
            head = take(1)[0]
            count = number() if head >> 4 == 15 else head >> 4
            return [head & 15, [value_of(head & 15) for _ in range(count)]]
        if kind == _TEXT:
            return take(number())
        if kind in (_DOUBLE, _BYTE):
            return take(8 if kind == _DOUBLE else 1)
        return (value := number()) >> 1 ^ -(value & 1)

    def struct() -> Fields:
        fields: Fields = {}
        last = 0
        while head := take(1)[0]:
            last = last + (head >> 4) if head >> 4 else value_of(4)
            kind = head & 15
            fields[last] = [kind, None if kind in (1, 2) else value_of(kind)]
        return fields

    return struct()


def packed(fields: Fields) -> bytes:
    """Returns the bytes of a struct."""

    def bytes_of(kind: int, value: Any) -> bytes:
        if kind == _STRUCT:
            return packed(value)
        if kind in _LISTS:
            element, values = value
            head = (
                bytes([len(values) << 4 | element])
                if len(values) < 15
                else bytes([240 | element]) + varint(len(values))
            )
            return head + b"".join(bytes_of(element, one) for one in values)
        if kind == _TEXT:
            return varint(len(value)) + value
        if kind in (_DOUBLE, _BYTE):
            return bytes(value)
        return varint((value << 1 ^ value >> 63) & (1 << 64) - 1)

    content, last = b"", 0
    for field, (kind, value) in sorted(fields.items()):
        content += (
            bytes([field - last << 4 | kind])
            if field - last < 16
            else bytes([kind]) + bytes_of(4, field)
        )
        content += b"" if value is None else bytes_of(kind, value)
        last = field
    return content + b"\0"


def read_footer(path: Path) -> Fields:
    content = path.read_bytes()
    return parsed(content[-8 - int.from_bytes(content[-8:-4], "little") : -8])


def write_footer(path: Path, fields: Fields) -> None:
    """Puts this footer in the place of a Parquet file's own."""
    content = path.read_bytes()
    footer = packed(fields)
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:end] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


_GROUPS, _CHUNKS, _ABOUT, _ROWS = 4, 1, 3, 3
_PLACES = (9, 10, 11)
"""Where a chunk's data, index and dictionary pages begin."""


def join_row_groups(files: Sequence[Path], path: Path) -> None:
    """Writes a file with the row groups of several files of one schema, with the encodings that they have there."""
    content, footer = b"PAR1", read_footer(files[0])
    groups = []
    for file in files:
        moved = len(content) - 4
        stored, own = file.read_bytes(), read_footer(file)
        for group in own[_GROUPS][1][1]:
            group.pop(5, None)  # where it begins
            for chunk in group[_CHUNKS][1][1]:
                for field in (4, 5, 6, 7):  # indices of pages
                    chunk.pop(field, None)
                about = chunk[_ABOUT][1]
                for field in (14, 15):  # a Bloom filter
                    about.pop(field, None)
                for place in [about[field] for field in _PLACES if field in about]:
                    place[1] += moved
            groups.append(group)
        content += stored[4 : -8 - int.from_bytes(stored[-8:-4], "little")]
    footer[_GROUPS][1][1] = groups
    footer[_ROWS][1] = sum(group[_ROWS][1] for group in groups)
    end = packed(footer)
    path.write_bytes(content + end + len(end).to_bytes(4, "little") + b"PAR1")
