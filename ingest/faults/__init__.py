"""Faults that are caused on purpose."""
