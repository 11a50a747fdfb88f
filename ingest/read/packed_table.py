"""The form of a packed copy: `packed` makes an entry of a table, `unpacked` a table of an entry.

An entry is the table's Arrow stream. Its whole numbers are packed into as many bits as their range needs, or into
indices of the values that occur, if that is less; lists and texts have the lengths of their rows instead of where they
begin. Numbers lie in lanes beside each other, so that the processor unpacks many at a time. What describes the entry
has a checksum, and so has every column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.ingest.stages.scatter_kernel import compiled, copied

VERSION = int.from_bytes(b"SluiceP1", "little")
_HEAD = 10
"""How many numbers begin an entry: its kind, parts, sections, the stream's bytes, their checksum (with the entry's
name), itself 0 in it; then four that hold the digest of the name."""
_SUM = 4
_LANES = 256  # numbers that are unpacked together; 32 rows of them are a block, of which the last one is smaller
_ALIGNED, _WORD = 64, 4
_RAW, _PACKED, _INDICES, _LENGTHS = range(4)
_DESCRIBED, _WIDTH, _FROM, _VALUES = 9, 1, 6, 7
"""Nine numbers describe a part of the stream: its kind, a number's bytes, the bits of a packed one, the base to add;
where it lies in the stream, and how many numbers it has; where it is packed, where the values are if these are indices,
and how many."""
_SECTION = 3
"""How many describe a section: its column (0: what describes the columns), where it ends, and its checksum."""
_FEWEST = 64  # numbers; what is smaller stays as it is
_MOST_DISTINCT, _PAYS = 2**16, 0.9  # values, and the share of bytes below which indices are worth it
_WHOLE: dict[int, tuple[Any, Any]] = {1: (np.int8, np.uint8), 2: (np.int16, np.uint16), 4: (np.int32, np.uint32),
                                      8: (np.int64, np.uint64)}


class DamagedCopy(ValueError):
    """An entry that is not as it was written."""


def packed(table: pa.Table, key: str) -> bytes | None:
    """The entry of a table; None, if that cannot have one, as it has no rows or more than one batch."""
    batches = table.combine_chunks().to_batches()
    if len(batches) != 1:
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        writer.write_batch(batches[0])
    stream = sink.getvalue()
    batch = pa.ipc.open_stream(stream).read_next_batch()
    content = np.frombuffer(stream, np.uint8)
    found = sorted((begin, n + 1, *_part(content[begin:begin + size].view(kind), as_lengths))
                   for n, column in enumerate(batch.columns) for buffer, kind, as_lengths in _buffers(column)
                   if (size := buffer.size // kind.itemsize * kind.itemsize) >= _FEWEST * kind.itemsize
                   for begin in [buffer.address - stream.address])
    parts: list[list[int]] = []
    placed: list[tuple[int, list[npt.NDArray[np.uint8]]]] = []  # for each part its section, and what is kept of it
    done = 0
    for begin, number, how, count, distinct, pieces in [*found, (len(content), 0, [], 0, 0, [])]:
        if begin > done:  # what describes the columns, and lies between them
            parts.append([_RAW, 1, 0, 0, done, begin - done, 0, 0, 0])
            placed.append((0, [content[done:begin]]))
        if how:
            parts.append([*how, begin, count, 0, 0, distinct])
            placed.append((number, pieces))
        done = begin + (how[_WIDTH] * count if how else 0)
    order = sorted(range(len(parts)), key=lambda n: placed[n][0])
    size = 8 * (_HEAD + _DESCRIBED * len(parts) + _SECTION * len({number for number, _ in placed}))
    entry, ends = [np.zeros(-size % _ALIGNED, np.uint8)], []
    size, checksum = size + len(entry[0]), crc32(entry[0].data)
    for number, members in groupby(order, key=lambda n: placed[n][0]):
        for n in members:
            for place, piece in zip((_FROM, _VALUES), placed[n][1], strict=False):
                parts[n][place] = size
                for one in (piece, np.zeros(-len(piece) % _ALIGNED, np.uint8)):
                    entry.append(one)
                    size, checksum = size + len(one), crc32(one.data, checksum)
        ends.append([number, size, checksum])
        checksum = 0
    head = np.zeros(_HEAD, np.int64)
    head[:4] = VERSION, len(parts), len(ends), len(content)
    head[_HEAD - 4:] = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.int64)
    described = np.concatenate([head, np.array(parts, np.int64).ravel(), np.array(ends, np.int64).ravel()])
    described[_SUM] = crc32(described.data)
    return b"".join([described.data, *(one.data for one in entry)])


def _buffers(array: pa.Array) -> Iterator[tuple[pa.Buffer, Any, bool]]:
    """The buffers of an array that hold numbers, as which, and whether these say where rows begin. All others stay as
    they are."""
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        yield from _buffers(array.indices)
        yield from _buffers(array.dictionary)
    elif types.is_struct(kind):
        for n in range(kind.num_fields):
            yield from _buffers(array.field(n))
    elif types.is_list(kind) or types.is_large_list(kind):
        yield array.buffers()[1], np.dtype(np.int64 if types.is_large_list(kind) else np.int32), True
        yield from _buffers(array.values)
    elif (wide := types.is_large_binary(kind) or types.is_large_string(kind)) or \
            types.is_binary(kind) or types.is_string(kind):
        _, offsets, content = array.buffers()
        yield offsets, np.dtype(np.int64 if wide else np.int32), True
        if content is not None:  # a bag of ids, most likely; other bytes take at most what they are
            yield content, np.dtype(np.int32), False
    elif types.is_primitive(kind) and not types.is_boolean(kind) and kind.byte_width in _WHOLE:
        yield array.buffers()[1], np.dtype(_WHOLE[kind.byte_width][types.is_unsigned_integer(kind)]), False


def _part(values: npt.NDArray[Any], as_lengths: bool
          ) -> tuple[list[int], int, int, list[npt.NDArray[np.uint8]]]:
    """How numbers are packed (kind, bytes, bits, base), how many they are, how many values occur, and what is kept."""
    whole, width, unsigned = values, values.itemsize, _WHOLE[values.itemsize][1]
    as_they_are = [_RAW, 1, 0, 0], values.nbytes, 0, [values.view(np.uint8)]
    if as_lengths:
        values = np.diff(values)
    low, high = int(values.min()), int(values.max())
    bits = (high - low).bit_length()
    usual = _bytes_for(len(values), bits) if bits <= 32 else values.nbytes
    if not as_lengths and width >= 2 and bits > 1:
        indices = np.empty(len(values), np.uint32)
        occurring = np.empty(min(_MOST_DISTINCT, max(1, usual // width)), unsigned)
        distinct = _distinct(values.view(unsigned), indices, occurring)
        few = max(1, (distinct - 1).bit_length())
        if distinct >= 0 and _bytes_for(len(values), few) + distinct * width < usual * _PAYS:
            return [_INDICES, width, few, 0], len(whole), distinct, [_packed_words(indices, few),
                                                                     occurring[:distinct].view(np.uint8)]
    if usual >= values.nbytes or (as_lengths and whole[0]):
        return as_they_are
    numbers = (values - values.dtype.type(low)).view(unsigned).astype(np.uint32)
    return [_LENGTHS if as_lengths else _PACKED, width, bits, low], len(whole), 0, [_packed_words(numbers, bits)]


def _bytes_for(count: int, bits: int) -> int:
    return _WORD * bits * -(-count // 32)


def _packed_words(numbers: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint8]:
    words = np.zeros(_bytes_for(len(numbers), bits) // _WORD, np.uint32)
    _pack(numbers, bits, words)
    return words.view(np.uint8)


@compiled
def _pack(numbers: Any, bits: Any, words: Any) -> None:
    begin, word = 0, 0
    while begin < len(numbers) and bits:
        lanes = min(_LANES, (len(numbers) - begin + 31) // 32)
        for n in range(min(32 * lanes, len(numbers) - begin)):
            shift = n // lanes * bits % 32
            at = word + n // lanes * bits // 32 * lanes + n % lanes
            words[at] |= numbers[begin + n] << np.uint32(shift)
            if shift + bits > 32:
                words[at + lanes] |= numbers[begin + n] >> np.uint32(32 - shift)
        begin += 32 * lanes
        word += bits * lanes


@compiled
def _distinct(values: Any, indices: Any, distinct: Any) -> int:
    """Numbers the values in the order in which they first occur, and returns how many there are; -1: more than there
    is room for."""
    size = 16
    while size < 2 * len(distinct):
        size *= 2
    places: Any = np.full(size, -1, np.int32)
    mask: Any = np.uint64(size - 1)
    count = 0
    for n in range(len(values)):
        at: Any = (np.uint64(values[n]) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & mask
        while places[at] >= 0 and distinct[places[at]] != values[n]:
            at = (at + np.uint64(1)) & mask
        if places[at] < 0:
            if count == len(distinct):
                return -1
            places[at] = count
            distinct[count] = values[n]
            count += 1
        indices[n] = places[at]
    return count


def load_compiled() -> None:
    """Loads the compiled calls into memory, which takes seconds if nothing is kept of an earlier run."""
    some = pa.table({str(kind): pa.array(range(128), kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())})
    content = packed(some.append_column("list", pa.array([[n] for n in range(128)], pa.large_list(pa.int8()))), "")
    assert content is not None
    unpacked(np.frombuffer(bytearray(content), np.uint8), "")


def unpacked(stored: npt.NDArray[np.uint8], key: str) -> pa.Table:
    """The table of an entry, after every checksum of it was compared."""
    if len(stored) < 8 * _HEAD or stored[:8].view(np.int64)[0] != VERSION:
        raise DamagedCopy("it is no packed copy of this version")
    head = stored[:8 * _HEAD].view(np.int64)
    parts, sections, size = map(int, head[1:4])
    middle = _HEAD + _DESCRIBED * parts
    long = 8 * (middle + _SECTION * sections)
    described = stored[:long if 8 * _HEAD < long <= len(stored) else 8 * _HEAD].view(np.int64).copy()
    described[_SUM] = 0
    if min(parts, sections, size) < 1 or crc32(described.data) != head[_SUM]:
        raise DamagedCopy("its head differs from its checksum (CRC-32)")
    if head[_HEAD - 4:].tobytes() != hashlib.sha256(key.encode()).digest():
        raise DamagedCopy("it is the copy of another row group")
    begin = long
    for number, end, checksum in described[middle:].reshape(sections, _SECTION).tolist():
        if end > len(stored) or crc32(stored[begin:end].data) != checksum:
            what = f"column {number}" if number else "what describes its columns"
            raise DamagedCopy(f"{what}, at bytes {begin} to {end} of {len(stored)}, differs from its checksum (CRC-32)")
        begin = end
    if begin != len(stored):
        raise DamagedCopy(f"it has {len(stored)} bytes in the place of {begin}")
    buffer = pa.allocate_buffer(size)
    if not _unpack(described[_HEAD:middle].reshape(parts, _DESCRIBED), stored, np.frombuffer(buffer, np.uint8)):
        raise DamagedCopy("its parts do not fit each other")
    return pa.ipc.open_stream(buffer).read_all()


@compiled
def _unpack(parts: Any, stored: Any, stream: Any) -> bool:
    """Unpacks all parts of a stream; false, if they do not fit into it or each other."""
    done, limit = 0, max(len(stream), len(stored))
    for n in range(len(parts)):
        kind, width, bits, base, at, count, begin, values, distinct = parts[n]
        if min(count, width) < 1 or max(count, begin, values, distinct) > limit or bits > 32 or \
                min(bits, begin, values, distinct, kind) < 0 or kind > _LENGTHS or \
                width not in (1, 2, 4, 8) or (kind == _RAW and width > 1) or (kind == _INDICES and distinct < 1):
            return False
        size = count if kind == _RAW else 4 * bits * ((count - (kind == _LENGTHS) + 31) // 32)
        if at != done or at + count * width > len(stream) or begin + size > len(stored) or \
                values + distinct * width > len(stored):
            return False
        done = at + count * width
        into, known = stream[at:done], stored[values:values + distinct * width]
        if kind == _RAW:
            copied(into, stored[begin:begin + size])
            continue
        packed = stored[begin:begin + size].view(np.uint32)
        if width == 1:
            _fill(kind, packed, bits, np.uint8(base), known, into)
        elif width == 2:
            _fill(kind, packed, bits, np.uint16(base), known.view(np.uint16), into.view(np.uint16))
        elif width == 4:
            _fill(kind, packed, bits, np.uint32(base), known.view(np.uint32), into.view(np.uint32))
        else:
            _fill(kind, packed, bits, np.uint64(base), known.view(np.uint64), into.view(np.uint64))
    return done == len(stream)


@compiled
def _fill(kind: Any, words: Any, bits: Any, base: Any, values: Any, into: Any) -> None:  # noqa: PLR0917
    numbers: Any = np.empty(_LANES, np.uint32)  # one row of lanes: it stays in the core's own cache
    begin, word, total = 0, 0, into[0]
    if kind == _LENGTHS:
        total = into[0] = 0
        into = into[1:]
    while begin < len(into):
        lanes = min(_LANES, (len(into) - begin + 31) // 32)
        for row in range(32):
            count = min(lanes, len(into) - begin)
            if count <= 0:
                break
            _row(words, word + row * bits // 32 * lanes, row * bits % 32, bits, numbers[:lanes])
            target = into[begin:begin + count]
            if kind == _PACKED:
                for n in range(count):
                    target[n] = numbers[n] + base
            elif kind == _INDICES:
                last = np.uint32(len(values) - 1)
                for n in range(count):
                    target[n] = values[min(numbers[n], last)]
            else:
                for n in range(count):
                    total = total + numbers[n] + base
                    target[n] = total
            begin += count
        word += bits * lanes


@compiled
def _row(words: Any, at: Any, shift: Any, bits: Any, numbers: Any) -> None:
    """Unpacks the numbers of one row of lanes, whose words begin there."""
    lanes = len(numbers)
    by, mask = np.uint32(shift), np.uint32((1 << bits) - 1)
    if bits == 0:
        numbers[:] = 0
    elif shift + bits <= 32:
        low = words[at:at + lanes]
        for lane in range(lanes):
            numbers[lane] = np.uint32(low[lane] >> by) & mask
    else:
        low, high, rest = words[at:at + lanes], words[at + lanes:at + 2 * lanes], np.uint32(32 - shift)
        for lane in range(lanes):
            numbers[lane] = np.uint32(np.uint32(low[lane] >> by) | np.uint32(high[lane] << rest)) & mask
