"""Windows: steps in which a rank also records parts of its passes."""
