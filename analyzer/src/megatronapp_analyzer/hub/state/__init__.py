"""State of a job that the hub keeps beside its steps: ranks, faults and verdicts."""
