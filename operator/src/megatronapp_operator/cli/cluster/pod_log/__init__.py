"""Lines of the log of a pod: those of an attempt, and those since a time."""
