"""Looks ids up in vocabularies of any size: held by workers, joined, or both."""
