"""The agent that tunes a pipeline while it runs: cost models, policies, the controller and run folders."""

if __name__ == "agent":
    # `python -m agent` in a checkout imports the package by its folder's name. It must still be the same module.
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.agent")
