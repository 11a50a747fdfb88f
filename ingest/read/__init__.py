"""From a URI to a decoded row group."""
