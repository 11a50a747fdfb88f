"""Processes around a session: what Python workers are forked from, and a whole cluster on one machine."""
