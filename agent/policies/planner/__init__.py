"""The planner: why it changes what, and what came of it."""
