"""What Spark's Python workers do in every pass, and keep between two of its tasks."""
