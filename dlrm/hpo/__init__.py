"""The search for good settings of the trainer."""
