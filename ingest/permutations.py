"""Permutations that are the same on every machine and with every version of numpy: of row groups, and of the rows of a
window."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt


def permutation(n: int, *key: str | int) -> npt.NDArray[np.int64]:
    """Returns a permutation of range(n) from `key`, the same on every machine and with every version of numpy.

    numpy guarantees that RandomState's shuffles and Philox's bits never change. Its newer Generator has no such
    guarantee."""
    seed = hashlib.sha256("/".join(map(str, key)).encode()).digest()[:16]
    bits = np.random.Philox(key=int.from_bytes(seed, "little"))
    return np.random.RandomState(bits).permutation(n).astype(np.int64, copy=False)


def window_halves(
    n: int, seed: int, epoch: int, stream: int, number: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Returns the epoch's two random permutations, rotated by an amount that depends on the window of n rows.

    This costs a tenth of a new permutation, and every row can still come to every place."""
    size = permutation_length(n)
    outer, inner = _epoch_permutations(size, seed, epoch)
    digest = hashlib.sha256(f"window/{seed}/{epoch}/{stream}/{number}".encode()).digest()
    first, second = (int.from_bytes(digest[at : at + 8], "little") % size for at in (0, 8))
    return outer[first : first + size], inner[second : second + size]


def permutation_length(n: int) -> int:
    """Returns the length of the permutations for a window of n rows. Windows of similar size share permutations."""
    return 1 << max(12, (n - 1).bit_length())


@functools.lru_cache(maxsize=8)
def _epoch_permutations(
    size: int, seed: int, epoch: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Returns two permutations, each repeated once, so that a rotated one is a slice."""
    outer, inner = (
        np.tile(permutation(size, name, seed, epoch).astype(np.uint32), 2)
        for name in ("outer", "inner")
    )
    return outer, inner
