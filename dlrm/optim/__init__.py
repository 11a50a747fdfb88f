"""Optimisers and their schedules."""
