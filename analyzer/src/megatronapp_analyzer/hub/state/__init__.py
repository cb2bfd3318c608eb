"""State of a job that the hub stores next to its steps: ranks, faults and verdicts."""
