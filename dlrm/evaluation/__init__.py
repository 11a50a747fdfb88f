"""AUC, and what to say of it."""
