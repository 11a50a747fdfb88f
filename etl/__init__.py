"""Spark jobs that write feature tables, and the contract (spec, operators, table) that others read them by."""

if (
    __name__ == "etl"
):  # imported by its folder's name, as `python -m etl` does in a checkout: still one module
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.etl")
