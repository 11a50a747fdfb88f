"""A job, from its request to the published version, on any engine."""
