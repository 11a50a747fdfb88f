"""Who may hold how much memory."""
