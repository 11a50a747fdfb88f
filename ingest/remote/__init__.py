"""Reads and shuffles row groups in other processes, here or on other hosts."""
