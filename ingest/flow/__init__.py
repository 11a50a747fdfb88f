"""From row groups to their places in batches."""
