"""Gives values their ids from vocabularies of any size: by a lookup in the workers, by a join, or both."""
