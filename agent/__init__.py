"""The agent that tunes a pipeline while it runs: models of stages, policies, controller, run folders."""
