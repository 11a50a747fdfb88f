"""Spark jobs that write feature tables, and the contract (spec, operators, table) that others read them by."""

# In a checkout, `python -m etl` imports the package by its folder's name. It stays one module.
if __name__ == "etl":
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.etl")
