"""Parts of the state machine that plays histories of one job against the operator's plan."""
