"""Planted faults: small changes of the sources, each of which some test should find."""
