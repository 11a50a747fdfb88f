"""The loader: stages from Parquet to training batches, in an exact order, resized while they run."""
