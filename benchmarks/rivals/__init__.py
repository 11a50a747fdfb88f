"""Tuners that others have published, as we read them, and two plain rules of thumb: to compare ours with.

`RIVALS` of `agent/policies/__init__.py` names them, for `sluice bench --tuning autotune` and the programs of the lab.
The folder is optional: without it all else works, and those programs say where the rivals are.
"""
