"""The stages from a row group to a batch, in the order of the data."""
