"""Policies judged, simulated and live."""
