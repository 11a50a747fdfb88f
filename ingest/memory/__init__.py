"""Decides which work may hold how much memory."""
