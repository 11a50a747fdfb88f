"""Plain Parquet: which of its columns become what, and which of its rows are loaded."""
