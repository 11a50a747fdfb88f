"""Tuners that others have published, as we read them."""
