"""A job from beginning to end, whichever engine does its work."""
