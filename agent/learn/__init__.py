"""Teaches the learned policies. No run imports this folder."""
