"""The feature table on disk: read, commit, pin, check, clean up."""
