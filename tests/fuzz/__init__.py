"""Fuzzers: each module has a NAME and `try_seed(seed, folder)`, which returns what it found. See `__main__`."""
