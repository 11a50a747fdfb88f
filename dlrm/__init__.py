"""The trainer: a DLRM on TorchRec, sharded, fed by `ingest`, tuned by `agent`."""

# In a checkout, `python -m dlrm` imports the package by its folder's name. It stays one module.
if __name__ == "dlrm":
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.dlrm")
