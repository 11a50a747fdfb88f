"""Teaches the learned policies: no run imports it."""
