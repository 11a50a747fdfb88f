"""The trainer: a DLRM on TorchRec, sharded, fed by `ingest`, tuned by `agent`."""

if __name__ == "dlrm":  # `python -m dlrm…` and `torchrun -m dlrm…` in a checkout: one module, whatever its name
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.dlrm")
