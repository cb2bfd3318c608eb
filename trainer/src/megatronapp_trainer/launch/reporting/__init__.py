"""Reports of a launcher: status, progress, logs and counters."""
