"""The agent that tunes a pipeline while it runs: models of stages, policies, controller, run folders."""

if __name__ == "agent":  # `sluice…` and `torchrun -m agent…` in a checkout: one module, whatever its name
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.agent")
