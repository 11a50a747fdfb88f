"""What is known of stages, and what a setting would bring: pure functions."""
