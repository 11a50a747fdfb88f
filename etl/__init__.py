"""Spark jobs that write feature tables, and the contract (spec, operators, table) that others read them by."""

if __name__ == "etl":  # `sluice…` and `torchrun -m etl…` in a checkout: one module, whatever its name
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.etl")
