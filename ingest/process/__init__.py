"""Transforms in processes of their own."""
