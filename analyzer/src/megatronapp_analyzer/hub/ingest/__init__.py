"""From frames of agents to complete steps, in memory and on disk."""
