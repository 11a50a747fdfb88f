"""The loader: stages from Parquet to training batches, in an exact order, resized while they run."""

if (
    __name__ == "ingest"
):  # imported by its folder's name, as `python -m ingest` does in a checkout: still one module
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.ingest")
