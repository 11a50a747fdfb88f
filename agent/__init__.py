"""The agent that tunes a pipeline while it runs: models of stages, policies, controller, run folders."""

if (
    __name__ == "agent"
):  # imported by its folder's name, as `python -m agent` does in a checkout: still one module
    import sys
    from importlib import import_module

    sys.modules[__name__] = import_module("sluice.agent")
