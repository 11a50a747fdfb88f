"""The planner: how it decides on changes, tries them, and takes them back."""
