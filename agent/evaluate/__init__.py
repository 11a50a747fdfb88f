"""Compares policies with each other, in the simulator and on live pipelines."""
