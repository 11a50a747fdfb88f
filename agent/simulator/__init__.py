"""Pipelines in numbers: scenarios, the best possible, a fake for tests."""
