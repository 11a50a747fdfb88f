"""One choice at every look, in the order of thought: observation, candidates, value, choice, effect."""
