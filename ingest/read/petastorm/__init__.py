"""Petastorm's part of reading: its schema, predicates, transforms and worker, on today's Arrow."""
