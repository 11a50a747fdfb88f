"""What stages cost, and what rate a setting would bring: pure functions."""
