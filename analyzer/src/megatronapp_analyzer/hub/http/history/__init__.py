"""How far back the stored traces of a job reach."""
