"""Applies a spec to Arrow batches, whatever the engine: shared by the engines, the loader and the server."""
