"""Assembly of complete steps from frames of agents, in memory and on disk."""
