"""Finds the files of an input, and reads them with Arrow, on every engine."""
