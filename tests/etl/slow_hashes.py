"""The hashes of values and rows, by whole numbers alone: a twin of `sluice.etl.ops.hashing`."""

G, A = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
M1, M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
NULL, ALL = 0x5851F42D4C957F2D, 2**64 - 1


def mixed(x: int) -> int:
    x = (x ^ x >> 30) * M1 & ALL
    x = (x ^ x >> 27) * M2 & ALL
    return x ^ x >> 31


def hashed(value: int | str | None, salt: int = 0) -> int:
    """The hash of a value, as its module's docstring tells it."""
    if value is None:
        return NULL
    if isinstance(value, int):
        return mixed((value & ALL) * G + A & ALL)
    content = value.encode()
    h = (len(content) ^ salt & ALL) * G & ALL
    for start in range(0, len(content), 8):
        h = (h ^ int.from_bytes(content[start : start + 8], "little")) * A & ALL
        h ^= h >> 32
    return mixed(h)


def key_of(row: dict, names: tuple[str, ...], seed: int = 0) -> int:
    """The key of a row that is known by the columns of these names."""
    key = seed * G & ALL
    for name in names:
        key = (key ^ hashed(row[name])) * A & ALL
        key ^= key >> 32
    return mixed(key)
