"""The trainer: a DLRM on TorchRec, sharded, fed by `ingest`, tuned by `agent`."""

if (
    __name__ == "dlrm"
):  # imported by its folder's name, as `python -m dlrm` does in a checkout: still one module
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.dlrm")
