"""The training loop and what feeds it."""
