"""Measures what stages cost, and predicts the rate of a setting. All functions are pure."""
