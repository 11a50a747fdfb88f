"""What `auto` adds to the planner: candidates, their learned advantage, and corrections from each machine."""
