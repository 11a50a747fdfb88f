"""Our 64-bit hash of values, the same in Spark, loader and serving, on every machine and in every version.

For text it runs over the UTF-8 bytes, read as little-endian 64-bit words, the last one padded with zero bytes:

    h = (salt ^ bytes) * G          all modulo 2^64; `bytes` is the length, so padding is no ambiguity
    for each word w:  h = (h ^ w) * A;  h = h ^ (h >> 32)
    return mix(h)                   mix as in splitmix64: two rounds of shift, xor and multiply, then a shift and xor

`Lookup` is a hash table of a vocabulary.

A whole number is hashed as the mix of its 64 bits with the salt; nulls get a constant of their own. Ids, splits and
the places of rows are taken from it: to change anything here is to change every table's content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.native import call_kernel, has_kernel

Hashes = npt.NDArray[np.uint64]
Whole = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]

G = np.uint64(0x9E3779B97F4A7C15)
A = np.uint64(0xD6E8FEB86659FD93)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
NULL = np.uint64(0x5851F42D4C957F2D)
_TURN = 16_000
"""The number of hashes that are computed together. For larger arrays, each step would get new memory from the
system."""
MOST_TEXT_BYTES = 2**20
"""The longest text that a row may have. The loader, jobs and the server reject rows with longer ones."""
_FEW = 64
"""Fewer texts than this are hashed one after the other, which takes 0.2 µs for a word. A step for all takes 30 µs."""

_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
)


def mix(x: Hashes) -> Hashes:
    """Mixes 64 bits by a bijection after which every bit depends on every bit: the finaliser of splitmix64."""
    x = x ^ (x >> np.uint64(30))
    x *= _M1
    x ^= x >> np.uint64(27)
    x *= _M2
    x ^= x >> np.uint64(31)
    return x


def codes_of(column: pa.DictionaryArray) -> Narrow:
    """Returns the place of each value in the column's dictionary. A null has the place after the last one."""
    return np.asarray(column.indices.fill_null(len(column.dictionary)))


def hash_texts(column: pa.Array, salt: int = 0) -> Hashes:
    """Hashes each value of a string or binary array; many of them in turns, whose steps stay in a core's cache. With a
    dictionary, each distinct value is hashed once."""
    if pa.types.is_dictionary(column.type):
        return np.append(hash_texts(column.dictionary, salt), NULL)[codes_of(column)]
    if has_kernel():
        return _hash_in_kernel(column, salt)
    if len(column) <= _TURN:
        return _hash_texts(column, salt)
    return np.concatenate(
        [_hash_texts(column.slice(start, _TURN), salt) for start in range(0, len(column), _TURN)]
    )


def offsets_and_bytes(column: pa.Array) -> tuple[AnyArray, AnyArray]:
    """Returns where the texts of a column begin and end, and their bytes, which may have others around them."""
    if not len(column):
        return np.zeros(1, np.int32), np.empty(0, np.uint8)
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, _offset_width(column))
    content = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)
    return bounds[column.offset : column.offset + len(column) + 1], content


def _hash_in_kernel(column: pa.Array, salt: int) -> Hashes:
    hashes = np.empty(len(column), np.uint64)
    offsets, content = offsets_and_bytes(column)
    is_wide = offsets.itemsize == 8
    call_kernel("hash_texts", content, offsets, is_wide, len(column), salt, hashes)
    return _with_nulls(mix(hashes), column)


def _with_nulls(hashes: Hashes, column: pa.Array) -> Hashes:
    """Returns the hashes with that of a missing value where the column has none."""
    if column.null_count:
        hashes[np.asarray(pc.is_null(column))] = NULL
    return hashes


def _hash_texts(column: pa.Array, salt: int) -> Hashes:
    """Hashes texts by numpy: the definition, and what workers of a cluster run."""
    count = len(column)
    if not count:
        return np.empty(0, np.uint64)
    offsets, data = offsets_and_bytes(column)
    offsets = offsets.astype(np.int64, copy=False)
    start, length = offsets[:-1], offsets[1:] - offsets[:-1]
    first, last = int(offsets[0]) & ~7, int(offsets[-1])
    # The words are aligned and padded, so that no gather goes beyond them.
    words = np.zeros((last - first + 7) // 8 + 2, np.uint64)
    if last > first:
        words.view(np.uint8)[: last - first] = data[first:last]
    h: Hashes = (length.astype(np.uint64) ^ np.uint64(salt & 0xFFFFFFFFFFFFFFFF)) * G
    start = start - first
    for done in range(0, int(length.max()), 8):
        rest = length - done
        if count >= _FEW and rest.min() > 0:
            h = _absorb(h, words, start + done, rest)
            continue
        some = np.flatnonzero(rest > 0)
        if len(some) < _FEW:
            for n in some.tolist():
                text = words.view(np.uint8)[start[n] + done : start[n] + length[n]]
                h[n] = _absorb_text(int(h[n]), text)
            break
        h[some] = _absorb(h[some], words, start[some] + done, rest[some])
    return _with_nulls(mix(h), column)


def _absorb(h: Hashes, words: Hashes, at: Whole, rest: Whole) -> Hashes:
    """Adds one more word to each value's hash: the up to eight bytes at `at`, of which `rest` belong to the value."""
    place = at >> 3
    shift = ((at & 7) << 3).astype(np.uint64)
    word = words[place]
    if shift.any():
        word = (word >> shift) | ((words[place + 1] << np.uint64(1)) << (np.uint64(63) - shift))
    if rest.min() < 8:
        spare = ((8 - np.minimum(rest, 8)) << 3).astype(np.uint64)
        word = (word << spare) >> spare
    h = (h ^ word) * A
    h ^= h >> np.uint64(32)
    return h


def _absorb_text(h: int, text: npt.NDArray[np.uint8]) -> int:
    """Adds all other words of a text to its hash."""
    for start in range(0, len(text), 2**16):
        content = text[start : start + 2**16].tobytes()
        for word in np.frombuffer(content + bytes(-len(content) % 8), "<u8").tolist():
            h = (h ^ word) * int(A) & 0xFFFFFFFFFFFFFFFF
            h ^= h >> 32
    return h


def hash_digits(column: pa.Array, salt: int = 0) -> Hashes:
    """Hashes whole numbers as `hash_texts` hashes their decimal digits. The kernel makes no texts for it."""
    if not has_kernel():
        return hash_texts(column.cast(pa.string()), salt)
    is_signed = not pa.types.is_unsigned_integer(column.type)
    whole = np.asarray(column.cast(pa.int64() if is_signed else pa.uint64()).fill_null(0))
    hashes = np.empty(len(whole), np.uint64)
    call_kernel("hash_digits", whole, is_signed, len(whole), salt, hashes)
    return _with_nulls(mix(hashes), column)


def rows_of_long_texts(column: pa.Array) -> Whole:
    """Returns the rows that have a text of more than `MOST_TEXT_BYTES`, also in a list or as a dictionary's value."""
    rows = None
    if column.nbytes <= MOST_TEXT_BYTES:
        return np.empty(0, np.int64)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        rows = pc.list_parent_indices(column).to_numpy()
        column = column.flatten()
    is_dictionary = pa.types.is_dictionary(column.type)
    texts = column.dictionary if is_dictionary else column
    if not any(is_text(texts.type) for is_text in _TEXTS):
        return np.empty(0, np.int64)
    lengths = pc.binary_length(texts)
    lengths = lengths.take(column.indices) if is_dictionary else lengths
    long = np.flatnonzero(np.asarray(lengths.fill_null(0)) > MOST_TEXT_BYTES)
    return long if rows is None else np.unique(rows[long])


def hash_numbers(column: pa.Array) -> Hashes:
    """Hashes each value of an integer or floating array; equal numbers of one type have equal hashes."""
    if pa.types.is_floating(column.type):
        # Adding 0.0 makes 0.0 of -0.0.
        values = np.asarray(column.cast(pa.float64()).fill_null(0.0)) + 0.0
        bits = np.where(np.isnan(values), np.float64("nan"), values).view(np.uint64)
    else:
        bits = np.asarray(column.cast(pa.int64()).fill_null(0)).view(np.uint64)
    return _with_nulls(mix(bits * G + A), column)


def hash_rows(columns: list[pa.Array], seed: int) -> Hashes:
    """Hashes all columns of each row, in order, into one key: the row's place in the table follows from it."""
    key: Hashes = (
        np.full(len(columns[0]) if columns else 0, np.uint64(seed & 0xFFFFFFFFFFFFFFFF)) * G
    )
    for column in columns:
        number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        key ^= hash_numbers(column) if number else hash_texts(column)
        key *= A
        key ^= key >> np.uint64(32)
    return mix(key)


def _offset_width(column: pa.Array) -> type[np.int32 | np.int64]:
    """Returns the type of the offsets at which an array's texts begin."""
    if pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type):
        return np.int64
    if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
        return np.int32
    raise TypeError(f"a {column.type} array holds no text")


@dataclass(frozen=True, slots=True)
class Lookup:
    """Finds the places of values in a vocabulary: an open hash table in numpy, for whole columns. It is at most half
    full, so nearly every value is found at the first or second try.

    Only the 64-bit hashes of values are compared. If two values of one vocabulary have the same hash, the table is
    refused when it is built. An unseen value has the hash of a known value with a chance of vocabulary size / 2^64."""

    hashes: Hashes
    owners: Narrow
    """The place in the vocabulary of the value in each slot, or -1 if the slot is empty."""

    @classmethod
    def of(cls, values: pa.Array) -> Lookup:
        """Returns the table of a vocabulary."""
        hashes = hash_texts(values)
        if len(np.unique(hashes)) < len(hashes):
            raise ValueError(
                "two values of one vocabulary have the same 64-bit hash; leave one out"
            )
        slots = 1 << max(4, (2 * len(hashes)).bit_length())
        owners = np.full(slots, -1, np.int32)
        waiting = np.arange(len(hashes), dtype=np.int32)
        slot = (hashes & np.uint64(slots - 1)).astype(np.int64)
        while len(waiting):
            free = owners[slot] < 0
            owners[slot[free]] = waiting[free]  # if several want one slot, one gets it
            lost = owners[slot] != waiting
            waiting, slot = waiting[lost], (slot[lost] + 1) & (slots - 1)
        table = np.zeros(slots, np.uint64)
        taken = owners >= 0
        table[taken] = hashes[owners[taken]]
        return cls(table, owners)

    def places(self, hashes: Hashes) -> Narrow:
        """Returns the place of each value, given its hash, or -1 for values outside the vocabulary."""
        last = len(self.owners) - 1
        slot = (hashes & np.uint64(last)).astype(np.int64)
        places = self.owners[slot]
        pending = np.flatnonzero((places >= 0) & (self.hashes[slot] != hashes))
        slot = slot[pending]
        while len(pending):
            slot = (slot + 1) & last
            owner = self.owners[slot]
            places[pending] = owner
            on = (owner >= 0) & (self.hashes[slot] != hashes[pending])
            pending, slot = pending[on], slot[on]
        return places
