"""The run folder, its page and its story."""
