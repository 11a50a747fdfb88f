"""Which rank holds what."""
