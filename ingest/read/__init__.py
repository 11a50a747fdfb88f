"""Reads row groups: everything from a URI to a decoded row group."""
