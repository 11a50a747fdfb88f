"""Runs transforms in processes of their own."""
