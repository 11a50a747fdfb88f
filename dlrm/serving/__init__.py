"""The server: from requests over HTTP to predictions."""
