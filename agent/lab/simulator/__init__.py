"""Simulated pipelines: scenarios, the best possible settings, and a fake for tests."""
