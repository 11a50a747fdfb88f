"""The loader: stages from Parquet to training batches, in an exact order, resized while they run."""

# In a checkout, `python -m ingest` imports the package by its folder's name. It stays one module.
if __name__ == "ingest":
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.ingest")
