"""Tuners that others have published, as we understand them, and simple rules for comparison."""
