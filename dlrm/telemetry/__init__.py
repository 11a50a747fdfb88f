"""How a run reports on itself: its journal, its progress on the terminal, its metrics."""
