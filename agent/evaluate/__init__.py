"""Evaluates policies, in the simulator and on live pipelines."""
