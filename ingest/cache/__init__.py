"""A cache of what users' functions made of rows, for later passes and runs."""
