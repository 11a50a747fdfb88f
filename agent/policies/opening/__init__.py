"""Opens a pipeline: chooses all knobs at the first look, by a network that was taught in simulated pipelines."""
