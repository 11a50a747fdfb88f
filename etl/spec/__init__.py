"""Feature specs: TOML that is read into frozen values."""
