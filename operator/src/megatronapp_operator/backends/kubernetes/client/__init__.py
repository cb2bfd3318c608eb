"""Client of the API server for the operator."""
