"""What rows cost in a pipeline, and what rate other conditions would bring: pure functions."""
