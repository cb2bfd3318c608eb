"""The dependency graph of one step, from exact keys, and its replay. No clock is needed to build it."""
