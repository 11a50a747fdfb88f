"""Ids looked up in vocabularies of any size: held, joined, or both."""
