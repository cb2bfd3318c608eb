"""Client of the API server."""
