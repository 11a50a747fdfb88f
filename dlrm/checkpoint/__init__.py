"""The checkpoints' format on disk."""
