"""What is learned above the planner."""
