"""Where a run tells of itself: journal, progress, metrics."""
